"""The plugin compiles with the toolkit at hand, exports one symbol, and loads on any machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import fsdpc

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900

sys.path.insert(0, str(ROOT / "tools"))
import ctest  # noqa: E402
import cuda_build  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_build.find_toolkit() is None, reason="there is no nvcc")


@pytest.mark.skipif(not shutil.which("nm"), reason="nm is not installed")
def test_it_exports_one_symbol(plugin: Path) -> None:
    done = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["fsdpc_plugin_open"]


def test_it_needs_no_library_of_nvidia(plugin: Path) -> None:
    done = subprocess.run(["ldd", plugin], capture_output=True, text=True)
    assert "cuda" not in done.stdout.replace(str(plugin), "") and "nccl" not in done.stdout


@pytest.mark.skipif(not shutil.which("readelf"), reason="readelf is not installed")
def test_folders_names_may_have_blanks(tmp_path: Path) -> None:
    source, folder = tmp_path / "empty.c", tmp_path / "a folder"
    source.write_text("int nothing;\n")
    command = [str(cuda_build.find_toolkit().nvcc), "-shared", "-Xcompiler=-fPIC",
               cuda_build.to_linker("-rpath", f"$ORIGIN/..:{folder}"), str(source)]
    library = cuda_build.link(command, tmp_path / "empty.so", [])
    done = subprocess.run(["readelf", "-d", library], capture_output=True, text=True)
    assert f"[$ORIGIN/..:{folder}]" in done.stdout


def test_it_loads_and_says_what_it_found(plugin: Path) -> None:
    [program] = ctest.build("plain", [ctest.TESTS / "test_plugin.c"])
    done = subprocess.run([program, plugin], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CUDA " in done.stdout


# In a process that has the wheel's package and nothing else of ours.
LOOK = """
import json
import fsdpc

opened = lambda: "libfsdpc_cuda" in open("/proc/self/maps").read()
before = opened()
config = fsdpc.show_config(print_=False)
print(json.dumps([before, opened(), config["cuda"], fsdpc.cuda.device_count(), fsdpc.__file__]))
"""


def setuptools_builds_fsdpc() -> bool:
    """Whether it is as new as pyproject.toml wants it."""
    return bool(find_spec("setuptools")) and int(version("setuptools").split(".")[0]) >= 77


def build_wheel(project: Path, out: Path, **variables: str) -> Path:
    """Build the wheel of a folder, its plugin for what `plugin` was built for; where it is."""
    env = {"FSDPC_CUDA_ARCHS": "90", **os.environ, **variables}
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
             "--no-build-isolation", "--wheel-dir", str(out), str(project)]
    done = subprocess.run(wheel, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def look(site: Path) -> list:
    """What a process says that has this folder's packages and nothing else of ours."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", LOOK], env=env, cwd=site,
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not setuptools_builds_fsdpc(), reason="there is no setuptools of 77 or newer")
def test_the_plugin_s_own_wheel_serves_the_fsdpc_of_its_version(
    plugin: Path, tmp_path: Path
) -> None:
    wheel = build_wheel(ROOT / "packages" / "cuda13", tmp_path)
    assert wheel.name.startswith(f"fsdpc_cuda13-{fsdpc.__version__}-py3-none-linux_")
    site, source = tmp_path / "site", Path(fsdpc.__file__).parent
    (site / "fsdpc").mkdir(parents=True)
    for path in source.iterdir():  # fsdpc as it is installed without a plugin
        if path.stem != Path(cuda_build.PLUGIN).stem:
            (site / "fsdpc" / path.name).symlink_to(path)
    assert look(site)[2] == "not built: the build left no reason"

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    [info] = site.glob("fsdpc_cuda13-*.dist-info")
    told = (info / "METADATA").read_text()
    assert f"\nRequires-Dist: fsdpc[cuda13]=={fsdpc.__version__}\n" in told
    assert [path.name for path in info.rglob("LICENSE")] == ["LICENSE"]
    before, after, described, _, where = look(site)
    assert Path(where).parent == site / "fsdpc"
    assert not before and after and described.startswith("CUDA ")

    (info / "METADATA").write_text(told.replace(f"\nVersion: {fsdpc.__version__}\n",
                                                "\nVersion: 9.9\n"))
    _, after, described, devices, _ = look(site)
    assert f"fsdpc-cuda13 is 9.9 and fsdpc is {fsdpc.__version__}: " in described
    assert not after and devices == 0


@pytest.mark.skipif(not setuptools_builds_fsdpc(), reason="there is no setuptools of 77 or newer")
def test_a_wheel_has_it_beside_the_extension_and_opens_it_when_asked(
    plugin: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(build_wheel(ROOT, tmp_path, FSDPC_CUDA="1")) as archive:
        archive.extractall(tmp_path / "site")
    package = tmp_path / "site" / "fsdpc"
    assert (package / cuda_build.PLUGIN).exists() and not (package / cuda_build.REASON).exists()
    assert [path.parent for path in package.rglob("_core*.so")] == [package]

    before, after, described, devices, where = look(tmp_path / "site")
    assert Path(where).parent == package
    assert not before and after
    assert described.startswith("CUDA ")
    if devices == 0:
        assert ", no GPU: " in described and len(described.split("no GPU: ")[1]) > 20, described
    else:
        assert f"{devices} GPU(s)" in described
