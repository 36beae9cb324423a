"""What tests of the emulated device share: the programs and the plugin, built once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import built


@pytest.fixture(scope="session")
def emulated() -> dict[str, Path]:
    """The programs and the plugin, by name."""
    return built()


@pytest.fixture(scope="session")
def environment(emulated: dict[str, Path]) -> dict[str, str]:
    """The environment of a Python process whose GPU is the emulated one; it imports from here."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "FSDPC_CUDA_PLUGIN": str(emulated["libfsdpc_cuda.so"]),
            "PYTHONPATH": os.pathsep.join(places)}


@pytest.fixture(scope="session")
def nccl(emulated: dict[str, Path], environment: dict[str, str]) -> dict[str, str]:
    """The same, with the fake NCCL, which ranks take although they share the GPU."""
    library = emulated["libfsdpc_cuda.so"].with_name("libnccl.so.2")
    return {**environment, "FSDPC_NCCL_LIB": str(library), "FSDPC_TRANSPORT": "nccl"}
