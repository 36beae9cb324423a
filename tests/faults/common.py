"""A small sharded model that says where it is in a step, and ranks that may die on the way."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # noqa: F401  when it is first imported Cython's set-up swallows a Ctrl-C

import fsdpc
from fsdpc import nn
from fsdpc.launching.forked import Report, run_forked

SOON_S = 1.0  # within which a failure must be named
WIDTH = 8

Say = Callable[[str], object]


def quiet(where: str) -> None:
    """Where the step is: nobody wants to know."""


class Net(nn.Module):
    """Two blocks and a head; ``say`` is called in the middle of forward and of backward."""

    def __init__(self, width: int = WIDTH, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.head = nn.Linear(width, 1)
        self.say: Say = quiet

    def forward(self, x: Any) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x).tanh()
            if i == 0:
                self.say("in forward")
                if x.requires_grad:
                    x.register_hook(self._in_backward)
        return self.head(x).mean()

    def _in_backward(self, gradient: Any) -> None:
        self.say("in backward")


def build(width: int = WIDTH, blocks: int = 2, seed: int = 1, **options: Any) -> Any:
    """The model with every block and the whole of it sharded."""
    fsdpc.manual_seed(seed)
    model = Net(width, blocks)
    for block in model.blocks:
        fsdpc.fully_shard(block, **options)
    return fsdpc.fully_shard(model, **options)


def batch(seed: int = 0, width: int = WIDTH) -> Any:
    return fsdpc.tensor(np.random.default_rng(seed).normal(size=(3, width)).astype(np.float32))


def step(model: Any, optimizer: Any, say: Say = quiet, seed: int = 0) -> float:
    """One training step that says which part of it begins."""
    model.say = say
    say("forward")
    loss = model(batch(seed))
    say("backward")
    loss.backward()
    say("clip")
    fsdpc.clip_grad_norm_(model, 1.0)
    say("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    say("barrier")
    fsdpc.barrier()
    return float(loss)


def full_bytes(model: Any) -> list[bytes]:
    """All parameters, gathered."""
    return [fsdpc.full_tensor(p).numpy().tobytes() for p in model.parameters()]


def raised(fn: Callable[[], object], *kinds: type[BaseException]) -> tuple[str, float]:
    """What a call that must raise says, and the clock when it did (one clock for all ranks)."""
    try:
        fn()
    except kinds as error:
        return str(error), time.monotonic()
    raise AssertionError(f"nothing was raised, expected {kinds}")


def run(fn: Callable[[int], object], ranks: int, **environment: str) -> list[Any]:
    """What fn(rank) returned on each of fresh ranks; None for those that were killed.

    For tests that run as one rank themselves, so that they may fork.
    """

    def body() -> Report:
        return Report("ok", fn(int(os.environ["RANK"])))

    outcome = run_forked(body, ranks, sys.stdout.write, timeout=120, env=environment)
    for failure in outcome.failures:
        assert "SIGKILL" in failure.text, failure.text
    assert not outcome.timed_out
    return [None if report is None else report.value for report in outcome.reports]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_gone(pid: int, within: float = 20.0) -> bool:
    """Whether the process ends in time (a zombie has ended)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], within)[0])
    finally:
        os.close(pidfd)


def wait_asleep(pid: int, within: float = 10.0) -> None:
    """Return when a process has gone to sleep, as a rank does that waits for its peers."""
    deadline = time.monotonic() + within
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline, f"process {pid} does not wait"
        os.sched_yield()


def wait_file(path: Path, within: float = 10.0) -> str:
    """Return a file's text once it has one."""
    deadline = time.monotonic() + within
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} does not appear"
        os.sched_yield()
    return path.read_text()
