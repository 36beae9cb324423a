"""What fsdpc says of GPUs where the plugin is missing, broken or never asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdpc
from fsdpc import cuda


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the plugin would be: nothing is there yet, and nothing has been asked yet."""
    path = tmp_path / "libfsdpc_cuda.so"
    monkeypatch.setattr(cuda, "_PLUGIN", path)
    cuda._found.cache_clear()
    yield path
    cuda._found.cache_clear()


def test_the_build_s_reason_is_told(plugin: Path) -> None:
    plugin.with_suffix(".txt").write_text("no nvcc anywhere\n")
    assert cuda.describe() == "not built: no nvcc anywhere"
    assert cuda.device_count() == 0
    assert fsdpc.show_config(print_=False)["cuda"] == "not built: no nvcc anywhere"


def test_without_a_plugin_nothing_opens_nccl(plugin: Path) -> None:
    assert fsdpc.show_config(print_=False)["nccl"] == "none: there is no plugin to open it"


def test_a_build_without_a_reason(plugin: Path) -> None:
    assert cuda.describe() == "not built: the build left no reason"


def test_a_broken_plugin_is_described_not_raised(plugin: Path) -> None:
    plugin.write_bytes(b"\x7fELF, or so it says")
    assert cuda.device_count() == 0
    assert cuda.describe().startswith("does not load: cannot load plugin: ")
    assert cuda.describe_nccl().startswith("none: cannot load plugin: ")


def test_a_library_that_is_no_plugin(plugin: Path) -> None:
    plugin.symlink_to(fsdpc._core.__file__)
    assert "is no plugin of fsdpc" in cuda.describe()


def package(folder: Path, version: str | None) -> Path:
    """Make an installed fsdpc-cuda13 whose plugin does not load; where that is."""
    (folder / "fsdpc_cuda13").mkdir()
    (folder / "fsdpc_cuda13" / "__init__.py").touch()
    (folder / "fsdpc_cuda13" / "libfsdpc_cuda.so").write_bytes(b"no ELF")
    if version:
        (folder / "fsdpc_cuda13-1.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: fsdpc-cuda13\nVersion: {version}\n"
        (folder / "fsdpc_cuda13-1.dist-info" / "METADATA").write_text(text)
    return folder / "fsdpc_cuda13" / "libfsdpc_cuda.so"


def test_the_package_of_this_version_is_found(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = package(tmp_path, fsdpc.__version__)
    monkeypatch.syspath_prepend(tmp_path)
    assert cuda.plugin_path() == there
    assert cuda.describe().startswith("does not load: cannot load plugin: ")
    plugin.write_bytes(b"no ELF either")
    assert cuda.plugin_path() == plugin


@pytest.mark.parametrize("version", ["0.0.9", None])
def test_the_package_of_another_version_is_refused(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    package(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    said = f"fsdpc-cuda13 is {version or 'of no known version'} and fsdpc is {fsdpc.__version__}: "
    assert cuda.describe().startswith(f"does not load: {said}")
    assert cuda.describe_nccl().startswith(f"none: {said}")
    with pytest.raises(RuntimeError, match=f"no device 'cuda': does not load: {said}"):
        fsdpc.set_default_device("cuda")


def test_importing_and_training_ask_nothing() -> None:
    program = ("import fsdpc; fsdpc.init(); fsdpc.tensor([1.0]).sum(); "
               "print(fsdpc.cuda._found.cache_info().currsize, "
               "'libfsdpc_cuda' in open('/proc/self/maps').read())")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "False"], done.stderr
