"""Steps of several ranks as graphs, over the fake NCCL: equal to steps without, or named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import ON_GPU, last_json, run

SOON_S = 5.0
PROGRAM = Path(__file__).with_name("graph_ranks.py")


def ranks(nccl: dict[str, str], what: str, *arguments: str, **more: str) -> list[Any]:
    """What each rank returned."""
    return last_json(nccl, PROGRAM, what, "cuda", *arguments, **more)


@pytest.mark.parametrize("world, strategies", [("2", 3), ("4", 1)])
def test_replays_are_the_steps_they_stand_for(nccl: dict[str, str], world: str,
                                              strategies: int) -> None:
    """To the bit, on new data of each rank at a new rate, with other steps in between."""
    results = ranks(nccl, "replays", world)
    for rank in results:
        assert len(rank) == strategies
        for strategy, (plain, graph) in rank.items():
            assert graph == plain, strategy
            assert len(set(plain["losses"])) == 7 and max(plain["norms"]) > 0.5, strategy
            assert set(plain["counts"]) == {7} and any(plain["states"]), strategy
    assert results[0] != results[1], "ranks had the same data"


def test_replays_wait_for_no_device(nccl: dict[str, str]) -> None:
    """Devices stand still until the last of three, and a step behind them, is made."""
    for waits, plain, graph in ranks(nccl, "still", "2", FSDPC_TIMEOUT_S="120"):
        assert waits == 0 and graph == plain


@pytest.fixture(scope="module")
def mistakes(nccl: dict[str, str]) -> list[Any]:
    return ranks(nccl, "mistakes", "2")


@pytest.mark.parametrize("mistake, error, of_one", [
    ("give_up", "RuntimeError: rank 1: the step that it captured was given up: KeyError: 'enough'",
     "KeyError: 'enough'"),
    ("stop_midway", "RuntimeError: rank 1: the step that it captured was given up: KeyError: 'enou",
     "KeyError: 'enough'"),
    ("leave_gradients", "RuntimeError: rank 1: unit 'Perceptron' has pending gradients when it",
     "RuntimeError: unit 'Perceptron' has pending gradients when it"),
    ("clip_alone", "RuntimeError: ranks captured different gathers and reductions",
     "RuntimeError: rank 0: ranks captured different gathers and reductions"),
    ("exchange", "NotImplementedError: barrier of 'barrier': ranks wait for each other", None),
    ("weights", "RuntimeError: rank 1: the weights of unit 'Perceptron' were written since its",
     "RuntimeError: the weights of unit 'Perceptron' were written since its"),
    ("parted", "RuntimeError: unit 'hidden.2' was given memory of its own for its unsharded",
     "RuntimeError: rank 0: unit 'hidden.2' was given memory of its own for its unsharded"),
    ("handed out", "NotImplementedError: rank 1: a local shard of unit 'hidden.0' was handed out",
     "NotImplementedError: a local shard of unit 'hidden.0' was handed out"),
])
def test_what_one_rank_does_is_named_on_all(mistakes: list[Any], mistake: str, error: str,
                                            of_one: str | None) -> None:
    if ON_GPU and mistake == "parted":
        pytest.skip("unsharded parameters of this size take no turns on a GPU")
    messages = [rank["messages"][mistake] for rank in mistakes]
    assert messages[0].startswith(error), messages
    assert messages[1].startswith(of_one or error), messages


def test_training_goes_on_as_if_nobody_had_tried(mistakes: list[Any]) -> None:
    for rank in mistakes:
        for plain, graph in rank["outcomes"]:
            assert graph == plain


@pytest.mark.parametrize("how, theirs", [
    ("eager", "rank 1 begins one by a forward"),
    ("another", "rank 1 posted replay of 'Perceptron' (unit -1, uint8, 2 bytes"),
])
def test_ranks_that_do_not_replay_alike_are_named(nccl: dict[str, str], how: str,
                                                  theirs: str) -> None:
    for message in ranks(nccl, "apart", "2", how):
        # Who finds it says MismatchError; the other may be told by that one's abort.
        found = re.match(r"MismatchError: |PeerError: rank \d: ranks disagree", message)
        assert found and theirs in message, message
        assert "rank 0 begins one by a replay of" in message or "rank 0 posted replay" in message


def test_a_rank_that_dies_behind_a_replay_is_named(nccl: dict[str, str], tmp_path: Path) -> None:
    done = run(nccl, PROGRAM, "pending", "cuda", "2", tmp_path / "end")
    assert done.returncode != 0 and "rank 1 of 2 failed" in done.stderr, done.stderr
    text, ended = json.loads((tmp_path / "end-0").read_text())
    assert text.startswith("PeerError: rank 1") and "what the GPU was given" in text, text
    assert ended - float((tmp_path / "end").read_text()) < SOON_S
