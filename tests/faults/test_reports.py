"""What a rank says while it waits, and what FSDPC_LOG makes it say."""

from __future__ import annotations

import os
import re
import time

import numpy as np
import pytest

import fsdpc
from fsdpc.distributed import pretend
from fsdpc.launching.forked import Report, run_forked

from .common import build, raised, step


def printed(fn: object, ranks: int, **environment: str) -> str:
    """All that fresh ranks print while they run fn(rank)."""
    lines: list[str] = []

    def body() -> Report:
        return Report("ok", fn(int(os.environ["RANK"])))

    outcome = run_forked(body, ranks, lines.append, timeout=120, env=environment)
    assert not outcome.failures, outcome.describe()
    return "".join(lines)


def train(rank: int) -> None:
    fsdpc.init()
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer)
    if rank == 1:
        time.sleep(0.4)  # the subject of the test: somebody is late
    fsdpc.barrier()
    fsdpc.shutdown()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.ranks(1, init=False)
def test_levels_of_the_log(level: int) -> None:
    text = printed(train, 2, FSDPC_LOG=str(level))
    notes = re.findall(r"fsdpc rank (\d): note: (.*)", text)
    debugs = re.findall(r"fsdpc rank (\d): debug: (.*)", text)
    assert bool(notes) == (level >= 2) and bool(debugs) == (level >= 3)
    if level < 2:
        assert text == ""
        return
    for rank in "01":
        own = [line for r, line in notes if r == rank]
        assert sum("made a parameter buffer of" in line for line in own) == 1
        assert any("made a reduce buffer" in line for line in own)
        # The first forward's and two optimizer steps'; the second forward's changes nothing.
        assert [bool(re.match("epoch [0-9]+ changes", line)) for line in own].count(True) == 3
    late = [line for r, line in notes if r == "0" and re.match(r"waited 0\.[3-9]", line)]
    assert len(late) == 1 and "in barrier of barrier for rank 1 (pid" in late[0]
    if level == 3:
        own = [line for r, line in debugs if r == "0"]
        posted = [line.split()[1] for line in own if line.startswith("posts")]
        # Forward and backward of two blocks, of the root once, which keeps its full: two steps.
        assert posted.count("gather") == 2 * 5
        assert posted.count("reduce_scatter") == 2 * 3


@pytest.mark.ranks(1, init=False)
def test_a_hang_report_has_the_end_of_the_trace() -> None:
    def rank_of(rank: int) -> None:
        fsdpc.init()
        model = build()
        optimizer = fsdpc.optim.AdamW(model.parameters())
        step(model, optimizer)
        if rank == 0:
            raised(fsdpc.barrier, TimeoutError)
        else:
            time.sleep(1.0)  # the subject of the test

    text = printed(rank_of, 2, FSDPC_TIMEOUT_S="0.6", FSDPC_NOTICE_S="0.3")
    waits = r"rank 0 has been waiting for 0\.3\S* s in barrier of 'barrier' for rank 1 \(pid"
    assert re.search(waits, text)
    # Once with the notice, once at the deadline.
    tails = re.findall(r"rank 0 before that: (.*)", text)
    assert len(tails) == 2
    events = tails[0].split("; ")
    assert len(events) == 8
    assert re.fullmatch(r"optim, 0\.3\S* s ago", next(e for e in events if e.startswith("optim")))
    assert any(event.startswith("epoch of unit 0 in epoch 2") for event in events)


@pytest.mark.ranks(1, init=False)
def test_a_late_rank_is_shown_with_what_it_waits_in_itself() -> None:
    """Two ranks in barriers of different groups: neither is in user code, as far as it looks."""

    def rank_of(rank: int) -> tuple[str, float]:
        fsdpc.init()
        world = fsdpc.distributed.world()
        other = world.split(0, rank)
        return raised([world, other][rank].barrier, TimeoutError, RuntimeError, fsdpc.PeerError)

    text = printed(rank_of, 2, FSDPC_TIMEOUT_S="0.8", FSDPC_NOTICE_S="0.3")
    assert re.search(r"for rank 1 \(pid \d+, waiting in barrier of 'barrier'\)", text), text


@pytest.mark.ranks(1, init=False)
def test_a_late_rank_of_another_host_is_named_once() -> None:
    """Rank 3 hears from rank 1 alone, which waits for rank 0."""

    def rank_of(rank: int) -> None:
        pretend.on_hosts(2)
        fsdpc.init()
        fsdpc.barrier()
        if rank == 0:
            time.sleep(1.0)  # the subject of the test
        fsdpc.all_gather(np.zeros(3))
        fsdpc.barrier()
        fsdpc.shutdown()

    text = printed(rank_of, 4, FSDPC_NOTICE_S="0.3")
    pattern = r"rank (\d) has been waiting for \S+ s in all_gather of \S+ for (.*)"
    waits = dict(re.findall(pattern, text))
    assert waits["3"] == "rank 1 on another host, or a rank there that it waits for", text
    assert waits["2"] == waits["3"].replace("1", "0"), text
