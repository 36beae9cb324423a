"""A fault on one of two hosts (namespaces): by each launcher, in each phase of a step.

The others are told which rank it was, on which host, where and by which signal, within 2 s. They
are told of a host whose ranks are all gone, or whose cable is cut, within 10 s. All launchers fail,
and nothing stays behind on any host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.load import Load
from tests.needs import need_hosts, need_mpi, need_torch

from .test_leaks import shm_left, shm_names

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("hosts_rank.py")
VICTIM = 3
SOON_S = {"host": 10.0, "cable": 10.0}  # within which others are told, on a machine without load
RANK_SOON_S = 2.0  # the same where it is about a rank
DEADLINE_S = 3  # of every wait, where the rank is stopped
OUTAGE_S = 20
LEAVE_S = 10.0  # for what launchers have started to end after them
PATIENCE_S = 120

sys.path.insert(0, str(ROOT / "tools"))
import net_hosts  # noqa: E402

need_hosts()

FAULTS = ("kill", "exit", "exception", "stop", "host", "cable")
# A phase, and how others name it.
PHASES = {"in forward": "forward of ", "in backward": "backward of ",
          "optimizer": "user code", "save": "user code"}
ENDED = "its launcher may have ended it for another rank"
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
    Cell("host", "in backward", "openmpi"),
    Cell("cable", "in forward", "mpich"),
}
CELLS = [Cell(f, p, by) for by in LAUNCHERS for f in FAULTS for p in PHASES]


@pytest.fixture(scope="module")
def hosts() -> Iterator[net_hosts.Hosts]:
    with net_hosts.net_hosts() as made:
        yield made


def commands(
    cell: Cell, hosts: net_hosts.Hosts, program: list[str], given: list[str]
) -> list[list[str]]:
    """What is started on each host; ranks are given these variables."""
    if cell.launcher == "torchrun":
        need_torch()
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
               f"--master-addr={net_hosts.ADDRESSES[0]}", "--master-port=29531"]
        return [[*inside, *run, f"--node-rank={i}", *program]
                for i, inside in enumerate(hosts.inside)]
    need_mpi(cell.launcher)
    from tests.mpi.test_two_hosts import command_of

    return [[*hosts.inside[0], *command_of(cell.launcher, hosts, *given), sys.executable,
             *program]]


class Found(NamedTuple):
    """What came of a cell."""

    codes: list[int]  # of the launchers
    output: str
    pid: str  # the victim's
    survivors: dict[int, tuple[str, str, float]]  # exception, text, seconds after the fault
    warned: float  # seconds after the fault until a stopped rank was said to be so
    left: list[str]  # what still runs, on either host
    slowness: float  # of the machine meanwhile


class Run:
    """Launchers that have been started, what their ranks leave, and how busy the machine is."""

    def __init__(self, cell: Cell, hosts: net_hosts.Hosts, folder: Path, **more: str) -> None:
        self.folder, self.hosts, self.launchers = folder, hosts, []
        door = "torch" if cell.launcher == "torchrun" else "native"
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",  # nobody answers there, and torch asks for names
            "FSDPC_TIMEOUT_S": "60",
            **more,
        }
        program = [str(PROGRAM), door, cell.fault, cell.phase, str(folder)]
        given = [name for name in more if name != "FSDPC_TIMEOUT_S"]
        for i, command in enumerate(commands(cell, hosts, program, given)):
            with (folder / f"output{i}").open("wb") as output:
                self.launchers.append(subprocess.Popen(command, env=environment, stdout=output,
                                                       stderr=output, cwd=ROOT))

    def output(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("output?")))

    def until(self, so: Callable[[], bool]) -> None:
        """Wait until it is so, or all launchers have ended."""
        end = time.monotonic() + PATIENCE_S
        while not so() and any(launcher.poll() is None for launcher in self.launchers):
            assert time.monotonic() < end, self.output()
            time.sleep(0.01)

    def strike(self, what: Callable[[], object]) -> None:
        """Do it once the victim is there, which then goes on."""
        self.until((self.folder / "asked").exists)
        assert (self.folder / "asked").exists(), self.output()
        what()
        (self.folder / "struck.part").write_text(repr(time.monotonic()))
        (self.folder / "struck.part").rename(self.folder / "struck")

    def finish(self) -> list[int]:
        return [launcher.wait(PATIENCE_S) for launcher in self.launchers]

    def ranks(self) -> list[str]:
        """Those that still run, by their pids."""
        pids = [file.read_text() for file in self.folder.glob("pid?")]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def left(self) -> list[str]:
        """Processes on either host, once they have had time to end."""
        end = time.monotonic() + LEAVE_S
        while (left := self.hosts.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def close(self) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


def happen(cell: Cell, hosts: net_hosts.Hosts, folder: Path, **more: str) -> Found:
    if cell.fault == "stop":
        more = {"FSDPC_TIMEOUT_S": str(DEADLINE_S), **more}
    run = Run(cell, hosts, folder, **more)
    warned = 0.0
    try:
        with Load() as load:
            if cell.fault == "cable":
                run.strike(lambda: hosts.cable("down"))
            elif cell.fault == "stop" and "FSDPC_WATCH" not in more:
                run.until(lambda: " is stopped" in run.output())
                warned = time.monotonic()
            if cell.fault == "cable" and cell.launcher != "torchrun":
                run.until(lambda: not run.ranks())
                hosts.cable("up")  # MPI's launchers wait for each other's side
            codes = run.finish()
        left = run.left()
    finally:
        run.close()
        hosts.cable("up")
    assert (folder / "struck").exists(), run.output()
    struck = float((folder / "struck").read_text())
    survivors = {}
    for file in folder.glob("rank?"):  # the launcher may have been faster
        kind, text, at = json.loads(file.read_text())
        survivors[int(file.name[-1])] = (kind, text, at - struck)
    last = struck + max((seconds for *_, seconds in survivors.values()), default=0.0)
    return Found(codes, run.output(), (folder / f"pid{VICTIM}").read_text(), survivors,
                 warned - struck, left, load.slowness(struck, last))


def names(cell: Cell, found: Found, rank: int) -> list[str]:
    """What each survivor says."""
    if cell.fault == "cable":
        node, first = ("node1", 2) if rank < 2 else ("node0", 0)
        return [f"host {node} (ranks {first} to {first + 1}) is gone or cut off"]
    if cell.fault == "host":
        return ["node1", " died"]
    if cell.fault == "stop":  # and the deadline may end those first who wait for others
        return []
    said = [f"rank {VICTIM}", f"pid {found.pid}", "node1", f"last seen in {PHASES[cell.phase]}"]
    return [*said, "died of signal 9"] if cell.fault == "kill" else said


def check(cell: Cell, found: Found) -> None:
    """Who spoke named the victim; where the launcher ends all ranks at once, it did."""
    limit = SOON_S.get(cell.fault, RANK_SOON_S) * found.slowness
    told = False
    for rank, (kind, text, seconds) in found.survivors.items():
        assert kind in ("PeerError", "TimeoutError", "RuntimeError"), (rank, kind, text)
        missing = [words for words in names(cell, found, rank) if words not in text]
        ended = cell.launcher != "torchrun" and "node1: rank 2 died" in text and ENDED in text
        assert not missing or ended, (rank, missing, text)
        told |= not missing
        assert seconds < limit + (DEADLINE_S if cell.fault == "stop" else 0), (rank, seconds, limit)
    if cell.launcher == "torchrun":
        # The victim's own launcher ends its other rank too, at times before that rank has spoken.
        assert {0, 1} <= set(found.survivors), found
    if cell.fault == "stop":  # the first rank of each host warns; what follows is the deadline
        stopped = f"warning: node1: rank {VICTIM} (pid {found.pid}) is stopped"
        assert all(f"rank {first}: {stopped}" in found.output for first in (0, 2)), found.output
        assert found.warned < limit, found
    elif cell.fault == "cable":  # Open MPI itself may end ranks of node0 before they raise
        assert {2, 3} & set(found.survivors), found
        assert f"fsdpc rank 0: warning: {names(cell, found, 0)[0]}" in found.output, found.output
    elif not told:
        check_launcher(cell, found)
    if cell.fault == "exception":
        assert f"Oops: {cell.phase}" in found.output, found.output


def check_launcher(cell: Cell, found: Found) -> None:
    """It had ended rank 2 before that could speak: its own line has the host, and how it ended."""
    status = {"exit": "7", "exception": "1"}.get(cell.fault, "9")
    if cell.launcher == "mpich" and cell.fault in ("exit", "exception") and found.survivors:
        return  # they have named host and neighbour; it is silent about a status that is no signal
    if cell.launcher == "mpich":  # it may name a neighbour, killed by itself or ended by UCX
        assert f"RUNNING AT {net_hosts.ADDRESSES[1]}" in found.output, found.output
        assert re.search(f"EXIT CODE: ({status}|9|1)\n", found.output), found.output
    else:
        assert re.search(f"on node {net_hosts.ADDRESSES[1]} exited on signal {status}"
                         f"|,{VICTIM}\\]\\s+Exit code: +{status}", found.output), found.output


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=str(c), marks=[] if c in QUICK else [pytest.mark.soak]) for c in CELLS],
)
def test_a_fault(cell: Cell, hosts: net_hosts.Hosts, tmp_path: Path) -> None:
    names = shm_names()
    found = happen(cell, hosts, tmp_path)
    check(cell, found)
    assert 0 not in found.codes, found
    assert found.left == []
    assert shm_left(names) == set()


def saved(folder: Path) -> list[bytes]:
    """The weights that a run has left."""
    return [file.read_bytes() for file in sorted((folder / "saved").glob("*.safetensors"))]


@pytest.mark.soak
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_cable_that_comes_back(
    launcher: str, hosts: net_hosts.Hosts, tmp_path: Path
) -> None:
    """Training goes on, with the bits of a run whose cable stayed."""

    def outage() -> None:
        hosts.cable("down")
        # Ranks go on at once, and meet a dead wire.
        threading.Timer(OUTAGE_S, lambda: hosts.cable("up")).start()

    for fault, what in (("none", lambda: None), ("outage", outage)):
        (folder := tmp_path / fault).mkdir()
        run = Run(Cell(fault, "in backward", launcher), hosts, folder, FSDPC_WATCH="60")
        try:
            run.strike(what)
            codes = run.finish()
            assert codes == [0] * len(codes), run.output()
            assert run.left() == []
        finally:
            run.close()
    assert "has not answered for 1.8 s" in run.output()
    assert saved(tmp_path / "outage") == saved(tmp_path / "none") != []


@pytest.mark.parametrize(
    "cell",
    [
        Cell("stop", "in forward", "mpich"),
        pytest.param(Cell("stop", "in forward", "torchrun"), marks=pytest.mark.soak),
        pytest.param(Cell("cable", "in backward", "torchrun"), marks=pytest.mark.soak),
        pytest.param(Cell("cable", "in backward", "openmpi"), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_without_a_watch(cell: Cell, hosts: net_hosts.Hosts, tmp_path: Path) -> None:
    """The deadline ends what no connection tells of; who waited says for whom."""
    found = happen(cell, hosts, tmp_path, FSDPC_WATCH="0", FSDPC_TIMEOUT_S=str(DEADLINE_S))
    limit = DEADLINE_S + RANK_SOON_S * found.slowness
    assert all(seconds < limit for *_, seconds in found.survivors.values()), found
    said = " ".join([found.output, *(text for _, text, _ in found.survivors.values())])
    # The first rank that fails speaks: its launcher may end the others before they have. Of a
    # stopped rank that may be its neighbour, and of a cable it may be either side.
    late = r"([23] on another host|3 \(pid)" if cell.fault == "stop" else "[0-3] on another host"
    assert re.search(f"for rank {late}", said), said
    assert "fsdpc rank 0: warning: node1" not in found.output, found.output
    assert 0 not in found.codes, found
    assert found.left == []


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_ctrl_c_at_one_torchrun(first: int, hosts: net_hosts.Hosts, tmp_path: Path) -> None:
    """In the middle of training: both hosts end."""
    run = Run(Cell("ctrl-c", "in forward", "torchrun"), hosts, tmp_path)
    try:
        run.strike(lambda: run.launchers[first].send_signal(signal.SIGINT))
        assert 0 not in run.finish(), run.output()
        assert run.left() == []
    finally:
        run.close()
