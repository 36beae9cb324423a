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


def test_importing_and_training_ask_nothing() -> None:
    program = ("import fsdpc, fsdpc.cuda; fsdpc.init(); fsdpc.tensor([1.0]).sum(); "
               "print(fsdpc.cuda._found.cache_info().currsize, "
               "'libfsdpc_cuda' in open('/proc/self/maps').read())")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["0", "False"], done.stderr
