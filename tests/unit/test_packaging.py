"""What is shipped: the source distribution, the wheel, and their metadata."""

from __future__ import annotations

import email
import email.message
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.lint.tree import ROOT, files, label

import fsdpc
from fsdpc import _core

WHEEL_BYTES = 10 << 20  # without the plugin for GPUs
NOT_SHIPPED = {".gitignore", ".github"}

# As a front end without isolation asks the backend. The extension is the one that runs these
# tests: compiling it again would take minutes.
BUILD = """
import shutil, sys

import build_backend
import native

_, hook, out, core = sys.argv

def build_core(target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(core, target)

native.build_core = build_core
print(getattr(build_backend, hook)(out))
"""


def build(what: str, tree: Path, out: Path) -> Path:
    """Build an sdist or a wheel of a tree; where it is."""
    out.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("FSDPC_")}
    env |= {"PYTHONPATH": str(tree / "tools"), "FSDPC_MPI": "0"}
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(out), _core.__file__]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a source distribution, built from a copy of the checkout's files."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    if not find_spec("setuptools") or int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("there is no setuptools of 77 or newer")
    folder = tmp_path_factory.mktemp("sdist")
    for path in files():
        target = folder / "checkout" / label(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    archive = build("sdist", folder / "checkout", folder / "out")
    assert archive.name == f"fsdpc-{fsdpc.__version__}.tar.gz"
    with tarfile.open(archive) as opened:
        opened.extractall(folder)
    return folder / f"fsdpc-{fsdpc.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without plugins, built from the source distribution alone."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel") / "out")


@pytest.fixture(scope="module")
def metadata(sdist: Path) -> email.message.Message:
    return email.message_from_string((sdist / "PKG-INFO").read_text())


# ---- the source distribution ----


def test_the_source_distribution_has_every_file(sdist: Path) -> None:
    missing = {label(path) for path in files() if not (sdist / label(path)).is_file()}
    assert {name for name in missing if name.split("/")[0] not in NOT_SHIPPED} == set()
    for folder in ("csrc", "kernels", "docs", "examples", "tests", "tools", "benchmarks"):
        assert any((sdist / folder).iterdir()), folder


def test_the_source_distribution_has_nothing_that_was_built(sdist: Path) -> None:
    made = {".so", ".o", ".pyc"}
    assert [path for path in sdist.rglob("*") if path.suffix in made] == []


def test_links_of_the_readme_lead_to_shipped_files(sdist: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (sdist / "README.md").read_text())
    relative = [link for link in links if not re.match(r"\w+:", link)]
    assert len(relative) > 20
    assert [link for link in relative if not (sdist / link).exists()] == []


# ---- metadata ----


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "fsdpc" and metadata["Version"] == fsdpc.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Author"] == "The fsdpc developers"
    assert metadata["Summary"] and "FSDP" in metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (metadata.get_payload() or metadata["Description"]).startswith("# fsdpc\n")
    classifiers = metadata.get_all("Classifier", [])
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert "Typing :: Typed" in classifiers


def test_pythons_that_are_named_were_tried(metadata: email.message.Message) -> None:
    found = re.findall(r":: (3\.\d+)$", "\n".join(metadata.get_all("Classifier", [])), re.M)
    page = (ROOT / "docs" / "install.md").read_text()
    tried = re.findall(r"^\| (3\.\d+) \| \S+ \| \w+ \| ok \|", page, re.M)
    assert sorted(set(tried)) == found and len(found) >= 4


def test_numpy_is_all_that_an_install_needs(metadata: email.message.Message) -> None:
    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert needed == ["numpy>=1.26"]


def test_the_version_stands_in_one_place() -> None:
    text = (ROOT / "python" / "fsdpc" / "_version.py").read_text()
    assert re.findall(r'^__version__ = "(.*)"$', text, re.M) == [fsdpc.__version__]
    for name in ("pyproject.toml", "setup.py", "CITATION.cff", "README.md"):
        assert fsdpc.__version__ not in (ROOT / name).read_text(), name


def test_the_changelog_begins_with_what_is_not_released() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    for heading in headings[1:]:
        assert re.fullmatch(r"\[?\d+\.\d+\.\d+\]? - \d{4}-\d\d-\d\d", heading), heading


def test_the_citation_has_what_its_format_requires() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["authors"] == [{"name": "The fsdpc developers"}]
    assert cited["license"] == "Apache-2.0" and cited["type"] == "software"


@pytest.mark.parametrize("path", files(".md", under=".github"), ids=label)
def test_issue_templates_say_what_they_are_for(path: Path) -> None:
    head = path.read_text().split("---\n")[1]
    assert set(re.findall(r"^(\w+): \S", head, re.M)) == {"name", "about", "labels"}


# ---- the wheel ----


def test_the_wheel_is_small_and_holds_the_package_alone(wheel: Path) -> None:
    assert wheel.stat().st_size < WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "fsdpc", f"fsdpc-{fsdpc.__version__}.dist-info",
    }  # fmt: skip
    assert {"fsdpc/py.typed", "fsdpc/_core.pyi", f"fsdpc/{Path(_core.__file__).name}"} <= set(names)
    assert [name for name in names if name.endswith((".c", ".h", ".cu"))] == []
    shipped = {label(path).removeprefix("python/") for path in files(under="python")}
    assert shipped - set(names) == set()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="csrc/base/glibc.h is x86's")
def test_the_wheel_loads_wherever_manylinux_2_28_does(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    show = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(show, capture_output=True, text=True, timeout=120)
    said = " ".join(done.stdout.split())
    assert 'consistent with the following platform tag: "manylinux_2_28_x86_64"' in said, (
        said + done.stderr
    )
    with zipfile.ZipFile(wheel) as archive:
        core = archive.extract(f"fsdpc/{Path(_core.__file__).name}", tmp_path)
    dynamic = subprocess.run(["readelf", "-d", core], capture_output=True, text=True).stdout
    assert "(NEEDED)" in dynamic and "RPATH" not in dynamic and "RUNPATH" not in dynamic


def test_the_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    look = "import fsdpc; print(fsdpc.__file__, fsdpc.__version__, float(fsdpc.ones(3).sum()))"
    done = subprocess.run([sys.executable, "-c", look], env={"PYTHONPATH": str(tmp_path)},
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    expected = f"{tmp_path / 'fsdpc' / '__init__.py'} {fsdpc.__version__} 3.0\n"
    assert done.stdout == expected, done.stderr
