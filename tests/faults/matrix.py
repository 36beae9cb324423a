"""A fault on one rank at a place of a run, and what the others and the launcher say."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import fsdpc
from fsdpc.launching.launcher import LaunchError, launch

from .common import Say, build, step, wait_asleep, wait_file

DEADLINE_S = 0.8  # of every wait where a rank is stopped

# Where the victim is: it says these itself, in user code ...
PHASES = (
    "init", "shard", "forward", "in forward", "backward", "in backward", "clip", "optimizer",
    "barrier", "shutdown",
)  # fmt: skip
# ... or it waits in the engine for rank 0, which stays in user code at that place.
WAITS = {
    "init": "the rendezvous",
    "shard": "the comparison of models",
    "forward": "an epoch",
    "backward": "a reduction",
    "clip": "the sum of squares",
    "optimizer": "an optimizer's epoch",
    "barrier": "a barrier",
}


class Oops(Exception):
    """The exception of a victim."""


class Cell(NamedTuple):
    """Which fault, where, on how many ranks; the last rank is the victim."""

    fault: str  # "kill", "stop", "exception"
    phase: str
    waits: bool
    ranks: int

    @property
    def victim(self) -> int:
        """The rank that it happens to."""
        return self.ranks - 1

    def __str__(self) -> str:
        place = f"waiting in {self.phase}" if self.waits else self.phase
        return f"{self.fault}, {place}, {self.ranks} ranks"


class Survivor(NamedTuple):
    """What a rank that had no fault met: an exception, or nothing ("")."""

    rank: int
    kind: str
    text: str
    seconds: float  # since the fault


def strike(cell: Cell, pid: int, folder: Path) -> None:
    """Let it happen now."""
    if cell.fault != "exception":
        (folder / "struck").write_text(repr(time.monotonic()))
        os.kill(pid, signal.SIGKILL if cell.fault == "kill" else signal.SIGSTOP)
    elif pid == os.getpid():
        (folder / "struck").write_text(repr(time.monotonic()))
        raise Oops(cell.phase)


def whole_run(say: Say) -> None:
    """A program from its first to its last line."""
    say("init")
    fsdpc.init()
    say("shard")
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    step(model, optimizer, say)
    say("shutdown")
    fsdpc.shutdown()


def on_rank(cell: Cell, folder: Path) -> None:
    """What every rank runs: the program, with the fault in it."""
    rank = int(os.environ["RANK"])

    def say(place: str) -> None:
        if place != cell.phase:
            return
        if rank == cell.victim:
            (folder / "pid").write_text(str(os.getpid()))
            if not cell.waits:
                strike(cell, os.getpid(), folder)
        elif rank == 0 and cell.waits:
            pid = int(wait_file(folder / "pid"))
            wait_asleep(pid)
            strike(cell, pid, folder)

    error: BaseException | None = None
    try:
        whole_run(say)
    except BaseException as caught:
        error = caught
        raise
    finally:
        if rank != cell.victim:
            at = time.monotonic()
            seconds = at - float(wait_file(folder / "struck"))
            kind = type(error).__name__ if error else ""
            found = Survivor(rank, kind, str(error or ""), seconds)
            (folder / f"rank{rank}").write_text(json.dumps(found))


class Found(NamedTuple):
    """All that is known of a cell once the launcher has ended."""

    survivors: list[Survivor]
    launcher: LaunchError | None
    seconds: float  # until the launcher ended


def happen(cell: Cell, folder: Path) -> Found:
    """Run a cell; call it from a process that may fork."""
    env = {"FSDPC_TIMEOUT_S": str(DEADLINE_S if cell.fault == "stop" else 60)}
    caught = None
    try:
        launch(on_rank, cell.ranks, cell, folder, env=env, timeout=120)
    except LaunchError as error:
        caught = error
    ended = time.monotonic()
    others = [rank for rank in range(cell.ranks) if rank != cell.victim]
    survivors = [Survivor(*json.loads(wait_file(folder / f"rank{rank}"))) for rank in others]
    return Found(survivors, caught, ended - float((folder / "struck").read_text()))


def quiet_launch(ranks: int) -> list[Any]:
    """A fresh run, as the next one after a fault."""
    return launch(lambda: whole_run(lambda place: None), ranks, timeout=120)
