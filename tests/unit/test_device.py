"""Choosing a device where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdpc
from fsdpc import cuda


@pytest.fixture
def no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the plugin had not been built, for a reason."""
    monkeypatch.setattr(cuda, "_PLUGIN", tmp_path / "libfsdpc_cuda.so")
    (tmp_path / "libfsdpc_cuda.txt").write_text("no nvcc anywhere\n")
    cuda._found.cache_clear()
    yield
    cuda._found.cache_clear()


def test_the_cpu_is_the_default() -> None:
    assert fsdpc.get_default_device() == "cpu"
    fsdpc.tensor([1.0])
    fsdpc.set_default_device("cpu")  # again: nothing happens
    assert fsdpc.get_default_device() == "cpu"


def test_devices_that_are_none() -> None:
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'cuda:1'"):
        fsdpc.set_default_device("cuda:1")


@pytest.mark.usefixtures("no_plugin")
def test_without_a_plugin_the_reason_is_told() -> None:
    with pytest.raises(RuntimeError, match="^no device 'cuda': not built: no nvcc anywhere$"):
        fsdpc.set_default_device("cuda")
    assert fsdpc.get_default_device() == "cpu"
