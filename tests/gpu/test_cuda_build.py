"""The plugin compiles with the toolkit at hand, exports one symbol, and loads on any machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900

sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402
import native  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_build.find_toolkit() is None, reason="there is no nvcc")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libfsdpc_cuda.so for one architecture."""
    return cuda_build.build_plugin(tmp_path_factory.mktemp("cuda") / "libfsdpc_cuda.so", ("90",))


@pytest.mark.skipif(not shutil.which("nm"), reason="nm is not installed")
def test_it_exports_one_symbol(plugin: Path) -> None:
    done = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["fsdpc_plugin_open"]


def test_it_needs_no_library_of_nvidia(plugin: Path) -> None:
    done = subprocess.run(["ldd", plugin], capture_output=True, text=True)
    assert "cuda" not in done.stdout.replace(str(plugin), "") and "nccl" not in done.stdout


def test_it_loads_and_says_what_it_found(plugin: Path, tmp_path: Path) -> None:
    builder = native.Builder(tmp_path)
    tests = ROOT / "tests" / "c"
    objects = builder.compile([tests / "test_plugin.c"], [f"-I{tests}"])
    objects += builder.compile(native.sources(("base", "device", "ops", "comm", "plugin")))
    program = builder.link(objects, tmp_path / "test_plugin")
    done = subprocess.run([program, plugin], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CUDA " in done.stdout
