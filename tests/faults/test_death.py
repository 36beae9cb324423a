"""A rank killed anywhere: the others name it within a second, or at their next engine call."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc import PeerError

from .common import SOON_S, build, die, quiet, raised, run, step, wait_asleep, wait_file, wait_gone

VICTIM = 1

PHASES = ["forward", "in forward", "backward", "in backward", "clip", "optimizer", "barrier"]


def prepared() -> tuple[Any, Any]:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.ranks(1, init=False)
def test_the_others_wait_while_it_dies_in_user_code(phase: str, tmp_path: Path) -> None:
    def rank_of(rank: int) -> tuple[str, float]:
        fsdpc.init()
        model, optimizer = prepared()

        def say(where: str) -> None:
            if rank == VICTIM and where == phase:
                (tmp_path / "died").write_text(str(time.monotonic()))
                die()

        return raised(lambda: step(model, optimizer, say), PeerError)

    for rank, result in enumerate(run(rank_of, 3)):
        if rank != VICTIM:
            text, at = result
            assert f"rank {VICTIM}" in text
            assert at - float((tmp_path / "died").read_text()) < SOON_S


@pytest.mark.parametrize("phase", ["forward", "in forward", "in backward", *PHASES[4:]])
@pytest.mark.ranks(1, init=False)
def test_it_dies_while_it_waits_itself(phase: str, tmp_path: Path) -> None:
    """Rank 2 stays behind, so that 0 and 1 wait inside the engine, and kills 1."""
    killer = 2

    def rank_of(rank: int) -> tuple[str, float, float]:
        fsdpc.init()
        model, optimizer = prepared()
        killed_at = 0.0

        def say(where: str) -> None:
            nonlocal killed_at
            if where != phase:
                return
            if rank == VICTIM:
                (tmp_path / "pid").write_text(str(os.getpid()))
            if rank == killer:
                victim = int(wait_file(tmp_path / "pid"))
                wait_asleep(victim)
                killed_at = time.monotonic()
                os.kill(victim, signal.SIGKILL)

        def go_on() -> None:
            step(model, optimizer, say)
            fsdpc.barrier()  # it may have done its part of the last one before it died

        return *raised(go_on, PeerError), killed_at

    survivor, _, last = run(rank_of, 3)
    assert f"rank {VICTIM}" in survivor[0] and f"rank {VICTIM}" in last[0]
    assert survivor[1] - last[2] < SOON_S
    assert last[1] - last[2] < SOON_S


@pytest.mark.ranks(1, init=False)
def test_it_dies_while_ranks_meet(tmp_path: Path) -> None:
    killer = 2

    def rank_of(rank: int) -> tuple[str, float]:
        if rank == VICTIM:
            (tmp_path / "pid").write_text(str(os.getpid()))
        if rank == killer:
            victim = int(wait_file(tmp_path / "pid"))
            wait_asleep(victim)
            killed_at = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            wait_file(tmp_path / "said")  # or its own end is what rank 0 sees first
            return "", killed_at
        said = raised(fsdpc.init, PeerError, TimeoutError)
        (tmp_path / "said").write_text(said[0])
        return said

    survivor, _, last = run(rank_of, 3)
    assert f"rank {VICTIM}" in survivor[0]
    assert survivor[1] - last[1] < SOON_S


CALLS = {
    "barrier": lambda model, optimizer: fsdpc.barrier(),
    "all_reduce": lambda model, optimizer: fsdpc.all_reduce(1.0),
    "step": step,
    "optimizer": lambda model, optimizer: optimizer.step(),
    "full_tensor": lambda model, optimizer: fsdpc.full_tensor(model.head.weight),
    "unshard": lambda model, optimizer: model.unshard(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(1, init=False)
def test_ranks_in_user_code_learn_it_at_their_next_call(call: str, tmp_path: Path) -> None:
    def rank_of(rank: int) -> tuple[str, float, str]:
        fsdpc.init()
        model, optimizer = prepared()
        if rank == VICTIM:
            (tmp_path / "pid").write_text(str(os.getpid()))
            die()
        assert wait_gone(int(wait_file(tmp_path / "pid")))
        began = time.monotonic()
        text, at = raised(lambda: CALLS[call](model, optimizer), PeerError)
        later, _ = raised(fsdpc.barrier, PeerError, RuntimeError)
        return text, at - began, later

    for rank, result in enumerate(run(rank_of, 3)):
        if rank != VICTIM:
            text, seconds, later = result
            assert f"rank {VICTIM}" in text and f"rank {VICTIM}" in later
            assert seconds < SOON_S


@pytest.mark.ranks(1, init=False)
def test_all_but_one_die(tmp_path: Path) -> None:
    def rank_of(rank: int) -> str:
        fsdpc.init()
        model, optimizer = prepared()
        if rank:
            try:
                step(model, optimizer, lambda where: die() if where == "in backward" else None)
            finally:
                die()  # also if another was quicker, and this one has been told
        return raised(lambda: step(model, optimizer, quiet), PeerError)[0]

    text = run(rank_of, 4)[0]
    assert any(f"rank {rank}" in text for rank in (1, 2, 3))


@pytest.mark.ranks(1, init=False)
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    def rank_of(rank: int) -> str:
        if rank == VICTIM:
            return wait_file(tmp_path / "named")
        text = raised(fsdpc.init, TimeoutError, PeerError)[0]
        (tmp_path / "named").write_text("yes")
        return text

    texts = run(rank_of, 3, FSDPC_TIMEOUT_S="1.5")
    assert f"rank {VICTIM}" in texts[0]


@pytest.mark.ranks(1, init=False)
def test_a_rank_that_ends_without_having_met_the_others_is_named_at_once() -> None:
    """The launcher knows, and says so on the page that all its ranks can read."""

    def rank_of(rank: int) -> tuple[str, float]:
        if rank == VICTIM:
            return "", time.monotonic()
        return raised(fsdpc.init, PeerError)

    (text, at), (_, ended) = run(rank_of, 2)
    assert f"rank {VICTIM} ended (exit code 0) before all ranks had met" in text
    assert at - ended < SOON_S
