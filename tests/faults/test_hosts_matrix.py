"""A fault on a rank of two hosts (namespaces): by each launcher, in each phase of a step.

The others are told which rank it was, on which host, where and by which signal, within 2 s; all
launchers fail, and nothing stays behind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.needs import need_hosts, need_mpi, need_torch

from .test_leaks import shm_names

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("hosts_rank.py")
VICTIM = 3
SOON_S = 10.0  # less than 2 where nothing else runs
DEADLINE_S = 3  # of every wait, where the rank is stopped
PATIENCE_S = 120

sys.path.insert(0, str(ROOT / "tools"))
import two_hosts  # noqa: E402

need_hosts()

FAULTS = ("kill", "exit", "exception", "stop")
PHASES = ("in forward", "in backward", "optimizer", "save")
LAUNCHERS = ("torchrun", "mpich", "openmpi")


class Cell(NamedTuple):
    """What happens, where, and who started the ranks."""

    fault: str
    phase: str
    launcher: str

    def __str__(self) -> str:
        return " ".join(self)


QUICK = {
    Cell("kill", "in forward", "mpich"),
    Cell("exception", "in backward", "mpich"),
    Cell("exit", "save", "mpich"),
    Cell("kill", "save", "openmpi"),
    Cell("exit", "optimizer", "openmpi"),
    Cell("stop", "in forward", "openmpi"),
    Cell("kill", "in backward", "torchrun"),
}
CELLS = [Cell(f, p, by) for by in LAUNCHERS for f in FAULTS for p in PHASES]


@pytest.fixture(scope="module")
def hosts() -> Iterator[two_hosts.Hosts]:
    with two_hosts.two_hosts() as made:
        yield made


def commands(cell: Cell, hosts: two_hosts.Hosts, program: list[str]) -> list[list[str]]:
    """What is started on each host."""
    if cell.launcher == "torchrun":
        need_torch()
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
               f"--master-addr={two_hosts.ADDRESSES[0]}", "--master-port=29531"]
        return [[*inside, *run, f"--node-rank={i}", *program]
                for i, inside in enumerate(hosts.inside)]
    need_mpi(cell.launcher)
    from tests.mpi.test_two_hosts import command_of

    return [[*hosts.inside[0], *command_of(cell.launcher, hosts), sys.executable, *program]]


class Found(NamedTuple):
    """What came of a cell."""

    codes: list[int]  # of the launchers
    output: str
    pid: str
    survivors: dict[int, tuple[str, str, float]]  # exception, text, seconds after the fault


def happen(cell: Cell, hosts: two_hosts.Hosts, folder: Path) -> Found:
    door = "torch" if cell.launcher == "torchrun" else "native"
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",  # nobody answers there, and torch asks for names
        "FSDPC_TIMEOUT_S": str(DEADLINE_S if cell.fault == "stop" else 60),
    }
    program = [str(PROGRAM), door, cell.fault, cell.phase, str(folder)]
    launchers = []
    for i, command in enumerate(commands(cell, hosts, program)):
        with (folder / f"output{i}").open("wb") as output:
            launchers.append(subprocess.Popen(command, env=environment, stdout=output,
                                              stderr=output, cwd=ROOT))
    try:
        codes = [launcher.wait(PATIENCE_S) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    output = "\n".join((folder / f"output{i}").read_text() for i in range(len(launchers)))
    assert (folder / "struck").exists(), output
    struck = float((folder / "struck").read_text())
    survivors = {}
    for rank in range(VICTIM):
        if not (folder / f"rank{rank}").exists():
            continue  # the launcher was faster
        kind, text, at = json.loads((folder / f"rank{rank}").read_text())
        survivors[rank] = (kind, text, at - struck)
    return Found(codes, output, (folder / "pid").read_text(), survivors)


def check(cell: Cell, found: Found) -> None:
    """Who spoke named the victim; where the launcher ends all ranks at once, somebody did."""
    died = cell.fault == "kill"
    named = f"rank {VICTIM} (pid {found.pid}" if died else f"rank {VICTIM}"
    for rank, (kind, text, seconds) in found.survivors.items():
        assert kind in ("PeerError", "TimeoutError", "RuntimeError"), (rank, kind, text)
        assert named in text or cell.fault == "stop", (rank, text)
        assert seconds < SOON_S + (DEADLINE_S if cell.fault == "stop" else 0), (rank, seconds)
        if died:
            assert "node1" in text and "died of signal 9" in text and "last seen in" in text, text
    if cell.launcher == "torchrun":
        # The victim's own launcher ends its other rank too, at times before that rank has spoken.
        assert {0, 1} <= set(found.survivors), found
    if cell.fault == "stop":  # the first rank of each host warns; what follows is the deadline
        stopped = f"warning: node1: rank {VICTIM} (pid {found.pid}) is stopped"
        assert all(f"rank {first}: {stopped}" in found.output for first in (0, 2)), found.output
    elif not found.survivors and cell.launcher == "mpich":
        # It had killed all before one could speak, and names the host; the process not always.
        assert f"RUNNING AT {two_hosts.ADDRESSES[1]}" in found.output, found.output
    elif not found.survivors:
        assert named in found.output, found.output
    if died:
        assert re.search(r"signal 9|EXIT CODE: 9|SIGKILL", found.output), found.output
    if cell.fault == "exception":
        assert f"Oops: {cell.phase}" in found.output, found.output


def left_behind(folder: Path) -> str:
    """Processes of the run, once they have had time to end."""
    end = time.monotonic() + SOON_S
    while left := subprocess.run(["pgrep", "-af", str(folder)], capture_output=True).stdout:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return left.decode()


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=str(c), marks=[] if c in QUICK else [pytest.mark.soak]) for c in CELLS],
)
def test_a_fault(cell: Cell, hosts: two_hosts.Hosts, tmp_path: Path) -> None:
    names = shm_names()
    found = happen(cell, hosts, tmp_path)
    check(cell, found)
    assert 0 not in found.codes, found
    assert left_behind(tmp_path) == ""
    left = shm_names() - names
    if cell.launcher == "mpich":  # MPICH's own, where its launcher killed the ranks
        left = {name for name in left if not name.startswith("mpich_shar")}
    assert not left
