"""What tests of the emulated device share: the programs and the plugin, built once.

With FSDPC_TEST_GPU=1 their Python programs run on this machine's GPU and NCCL, by the plugin beside
the package; what is about the emulation itself, or the fakes, is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import ON_GPU, EnvironmentOf, built
from tests.needs import need_nccl


@pytest.fixture(scope="session")
def emulated() -> dict[str, Path]:
    """The programs and the plugin, by name."""
    if ON_GPU:
        pytest.skip("about the emulation, which FSDPC_TEST_GPU=1 replaces")
    return built()


@pytest.fixture(scope="session")
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a Python process whose GPU is the emulated one; it imports from here."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    if ON_GPU:  # tests compare bits
        found.setdefault("FSDPC_CUDNN", "1")
    else:
        emulated = request.getfixturevalue("emulated")
        found["FSDPC_CUDA_PLUGIN"] = str(emulated["libfsdpc_cuda.so"])
    return found


@pytest.fixture(scope="session")
def nccl(request: pytest.FixtureRequest, environment: dict[str, str]) -> dict[str, str]:
    """The same for several ranks, which share the GPU: with the fake NCCL."""
    if ON_GPU:
        need_nccl(2)
        return environment
    emulated = request.getfixturevalue("emulated")
    library = emulated["libfsdpc_cuda.so"].with_name("libnccl.so.2")
    return {**environment, "FSDPC_NCCL_LIB": str(library)}


@pytest.fixture(scope="session")
def environment_of(request: pytest.FixtureRequest, environment: dict[str, str]) -> EnvironmentOf:
    """The environment by the number of ranks: one rank needs no NCCL."""
    return lambda world: environment if int(world) == 1 else request.getfixturevalue("nccl")
