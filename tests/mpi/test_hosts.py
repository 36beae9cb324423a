"""The native frontend on several hosts, whose bytes MPI carries; by each MPI that is installed.

Hosts are pretended: ranks that are told of different ones share no memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import need_mpi

from .test_transport_mpi import COMPILERS, OPTIONS, mpi_build

PROGRAM = Path(__file__).with_name("train.py")
TIMEOUT_S = 120

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", params=mpi_build.FAMILIES)
def start(request: pytest.FixtureRequest) -> Start:
    return started_by(request.param)


def started_by(family: str) -> Start:
    """What starts four ranks, so many of them on each host."""
    need_mpi(family)
    compiler = Path(COMPILERS[family])
    mpiexec = compiler.with_name(compiler.name.replace("mpicc", "mpiexec"))
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "FSDPC_TIMEOUT_S": "60",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}

    def run(ranks_of_host: int, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(mpiexec), *OPTIONS[family], "-n", "4", sys.executable, str(PROGRAM)]
        return subprocess.run([*command, str(ranks_of_host), *words], capture_output=True,
                              text=True, timeout=TIMEOUT_S, env=environment)

    return run


@pytest.fixture(scope="module")
def one_start() -> Start:
    """By the first MPI that there is: what is tested with it is the engine."""
    return started_by(sorted(COMPILERS)[0])


def test_bits_are_those_of_one_host(start: Start) -> None:
    sums = set()
    for ranks_of_host in (4, 2, 1):
        done = start(ranks_of_host)
        assert done.returncode == 0, done.stdout + done.stderr
        told = [word for word in done.stdout.split() if word.startswith("crc:")]
        assert len(told) == 4, done.stdout + done.stderr
        sums.update(told)
    assert len(sums) == 1, sums


@pytest.mark.parametrize("options", [
    "FULL_SHARD bf16 no_sync hold", "SHARD_OPTIM", "SHARD_OPTIM bf16 hold", "SHARD_GRAD_OP fp16",
    "NO_SHARD fp16 no_sync", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2 bf16 no_sync",
    "HYBRID_SHARD late hold", "deterministic", "deterministic bf16 no_sync",
])  # fmt: skip
def test_every_strategy_has_the_bits_of_one_host(one_start: Start, options: str) -> None:
    """On two hosts, and, as one of them alone has other groups then, on four."""
    sums = {}
    for ranks_of_host in (4, 2, 1):
        done = one_start(ranks_of_host, *options.split())
        assert done.returncode == 0, done.stdout + done.stderr
        sums[ranks_of_host] = {w for w in done.stdout.split() if w.startswith("crc:")}
    assert len(set.union(*sums.values())) == 1, sums


def test_checkpoints_of_several_hosts(one_start: Start, tmp_path: Path) -> None:
    """Their bytes are one host's."""
    for ranks_of_host in (4, 2):
        (folder := tmp_path / str(ranks_of_host)).mkdir()
        done = one_start(ranks_of_host, f"save={folder}")
        assert done.returncode == 0 and "refused" not in done.stdout, done.stdout + done.stderr
    files = [sorted((tmp_path / n / "step").glob("*.safetensors")) for n in ("4", "2")]
    assert files[0] and [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a folder")
def test_a_folder_that_hosts_do_not_share_is_refused(one_start: Start, tmp_path: Path) -> None:
    """On all ranks, and it stays empty on every host."""
    (folder := tmp_path / "unshared").mkdir()
    done = one_start(2, f"save={folder}", "unshared")
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"{folder} is another folder on "
    assert done.stdout.count("refused: ") == 4 == done.stdout.count(said), done.stdout
    assert done.stdout.count("left there: []") == 4, done.stdout
    assert list(folder.iterdir()) == []


def test_an_exception_ends_all(start: Start) -> None:
    done = start(2, "raise")
    assert done.returncode != 0
    assert "RuntimeError: rank 3 has enough" in done.stderr, done.stderr
