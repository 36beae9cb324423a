"""SIGKILL before every call that a save makes: a resume finds the newest committed, always."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc.checkpoint import CheckpointManager
from tests.faults.common import die, run

from .common import hooked, llama, values


def state_of(step: int) -> dict[str, Any]:
    return {"model": llama(seed=step)}


def record(folder: Path, ranks: int) -> list[int]:
    """How many calls each rank makes in a save."""

    def count(rank: int) -> int:
        fsdpc.init()
        manager = CheckpointManager(folder)
        seen: list[str] = []
        with hooked(lambda call, where: seen.append(call)):
            manager.save(1, state_of(1))
        fsdpc.barrier()
        return len(seen)

    return run(count, ranks)


# Who is killed of how many. With more than two there are survivors that must agree. One of two is
# killed at every call; others, and those that save asynchronously, at every third.
KILLS = {
    "rank 0 of 2": ([0], 2),
    "rank 1 of 2": ([1], 2),
    "both of 2": ([0, 1], 2),
    "ranks 1 and 3 of 4": ([1, 3], 4),
}


@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "next"])
@pytest.mark.parametrize("who", KILLS)
@pytest.mark.ranks(1, init=False, timeout=600)
def test_killed_at_every_call(who: str, first: bool, async_: bool, tmp_path: Path) -> None:
    victims, ranks = KILLS[who]
    counts = record(tmp_path / "count", ranks)
    calls = max(counts[v] for v in victims)
    every = 1 if ranks - len(victims) == 1 and not async_ else 3  # for speed
    # The first turn's number is that of all calls: nobody is killed in it.
    turns = {k: tmp_path / str(k) for k in range(calls, -1, -every)}
    for k, folder in turns.items():

        def save(rank: int, folder: Path = folder, k: int = k) -> None:
            fsdpc.init()
            manager = CheckpointManager(folder, async_=async_)
            if not first:
                manager.save(1, state_of(1))
                manager.wait()
            left = k

            def kill(call: str, where: str) -> None:
                nonlocal left
                left -= 1
                if left == -1 and rank in victims:
                    die()

            with hooked(kill), contextlib.suppress(fsdpc.PeerError):  # of the survivor
                manager.save(2, state_of(2))
                manager.wait()

        run(save, ranks)

    committed = {k for k, folder in turns.items() if (folder / "step-00000002").exists()}
    assert calls in committed

    def resume(rank: int) -> dict[int, tuple[int | None, bool]]:
        fsdpc.init()
        found = {}
        for k, folder in turns.items():
            manager = CheckpointManager(folder)
            state = state_of(9)
            step = manager.restore(state)
            same = step is None or values(state["model"]) == values(llama(seed=step))
            manager.save(3, state)  # what was left behind is in nobody's way
            found[k] = step, same
        fsdpc.barrier()
        return found

    before = None if first else 1
    want = {k: (2 if k in committed else before, True) for k in turns}
    assert run(resume, ranks) == [want] * ranks
    for k, folder in turns.items():
        steps = [1] * (not first) + [2] * (k in committed) + [3]
        assert sorted(os.listdir(folder)) == [f"step-{s:08}" for s in steps], k
