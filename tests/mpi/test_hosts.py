"""The native front door on several hosts, whose bytes MPI carries; by each MPI that is installed.

Hosts are pretended: ranks that are told of different ones share no memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .test_link_mpi import COMPILERS, OPTIONS, mpi_build

PROGRAM = Path(__file__).with_name("train.py")
PACKAGE = Path(mpi_build.native.ROOT) / "python" / "fsdpc"
TIMEOUT_S = 120

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=sorted(COMPILERS))
def start(request: pytest.FixtureRequest) -> Start:
    """Start four ranks, so many of them on each host."""
    if not (PACKAGE / mpi_build.library_name(request.param)).exists():
        pytest.skip(f"fsdpc was built without {request.param}")
    compiler = Path(COMPILERS[request.param])
    mpiexec = compiler.with_name(compiler.name.replace("mpicc", "mpiexec"))
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "FSDPC_TIMEOUT_S": "60",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}

    def run(ranks_of_host: int, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(mpiexec), *OPTIONS[request.param], "-n", "4", sys.executable, str(PROGRAM)]
        return subprocess.run([*command, str(ranks_of_host), *words], capture_output=True,
                              text=True, timeout=TIMEOUT_S, env=environment)

    return run


def test_bits_are_those_of_one_host(start: Start) -> None:
    sums = set()
    for ranks_of_host in (4, 2, 1):
        done = start(ranks_of_host)
        assert done.returncode == 0, done.stdout + done.stderr
        told = [word for word in done.stdout.split() if word.startswith("crc:")]
        assert len(told) == 4, done.stdout + done.stderr
        sums.update(told)
    assert len(sums) == 1, sums


def test_an_exception_ends_all(start: Start) -> None:
    done = start(2, "raise")
    assert done.returncode != 0
    assert "RuntimeError: rank 3 has enough" in done.stderr, done.stderr
