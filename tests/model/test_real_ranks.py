"""The model's scenarios as Python programs on real ranks: they end as the model says.

Every word of scenarios.py is what a user would write; a scenario's several ends are all allowed.
Where the library compares more than the model does (fingerprints of gathers) it may find another
name for a disagreement, but it must find one.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fsdpc
from fsdpc.launching.forked import Report, run_forked
from tests.faults.common import Net, batch, wait_file
from tests.offload import on_disk

from .scenarios import SCENARIOS, Scenario

DEADLINE_S = "1.5"  # of what only a deadline ends

# The model's end, and what some rank must say.
DISAGREE = "disagree|abandoned"
TEXTS = {
    "named: epochs disagree": "ranks disagree in epoch|ranks disagree in operation",
    "named: operation abandoned": DISAGREE,
    "named: operations disagree": DISAGREE,
    "named: epochs crossed": "ranks disagree on the order of models|in operation",
    "refused: weights changed between": "changed between forward and backward",
    "refused: weights changed while": "while rank . holds a unit by unshard",
    "refused: a forward with gradients inside": r"a forward with gradients of .* inside hold\(\)",
    "refused: an optimizer stepped inside": r"an optimizer stepped inside hold\(\)",
    "waits for a rank that ended": "rank . .*(left|died)",
    "waits for a rank in a foreign barrier": "rank . has been waiting .* for rank .*in user code",
}


class Ended(NamedTuple):
    """How a rank's program ended: the error's class and text, or nothing."""

    kind: str = ""
    text: str = ""


class Speaker:
    """One rank's models, and what each word does with them."""

    def __init__(self, folder: Path, ranks: int, disk: Path | None) -> None:
        fsdpc.manual_seed(1)
        self.models = [self._sharded(disk), self._sharded(disk)]
        self.optimizers = [fsdpc.optim.AdamW(m.parameters(), lr=0.1) for m in self.models]
        self.losses: list[list[Any]] = [[], []]
        self.holds = [ExitStack(), ExitStack()]
        self.folder, self.ranks, self.foreign = folder, ranks, 0

    @staticmethod
    def _sharded(disk: Path | None) -> Any:
        model = Net()
        policy = on_disk(disk, "masters", "optimizer") if disk else None
        for block in model.blocks:
            fsdpc.fully_shard(block, offload_policy=policy)
        return fsdpc.fully_shard(model, offload_policy=policy)

    def say(self, word: str) -> None:
        """Do what the word says, with the first model or, in lower case, the second."""
        which = int(word.islower())
        model, losses = self.models[which], self.losses[which]
        match word.upper():
            case "F" | "G":
                losses.append(model(batch()))
            case "E" | "V":
                with fsdpc.no_grad():
                    model(batch())
            case "C":
                with fsdpc.no_grad():
                    model.blocks[0](batch())
            case "B":
                losses.pop(0).backward()
            case "N":
                losses.pop().backward()
            case "D":
                losses.pop()
            case "W":
                for p in model.parameters():
                    p.local.numpy()[...] *= 1.01
            case "O" | "L":
                self.optimizers[which].step()
            case "U":
                model.unshard()
            case "S":
                model.reshard()
            case "H":
                self.holds[which].enter_context(model.hold())
            case "X":
                self.holds[which].close()
            case "T":
                fsdpc.full_tensor(model.head.weight)
            case "|":
                fsdpc.barrier()
            case "!":
                self._foreign_barrier()
            case _:
                raise AssertionError(f"no word is {word!r}")

    def _foreign_barrier(self) -> None:
        self.foreign += 1
        (self.folder / f"{self.foreign}-{fsdpc.rank()}").write_text("here")
        for rank in range(self.ranks):
            wait_file(self.folder / f"{self.foreign}-{rank}", within=2.5)


def speak(scenario: Scenario, folder: Path, disk: Path) -> tuple[str, str]:
    """Run this rank's program to its end; steps are late where they go through a disk."""
    rank = int(os.environ["RANK"])
    fsdpc.init()
    late = "L" in scenario.texts[rank]
    speaker = Speaker(folder, len(scenario.texts), disk if late else None)
    try:
        for word in scenario.texts[rank].replace(" ", ""):
            speaker.say(word)
        fsdpc.shutdown()
    except (RuntimeError, fsdpc.PeerError, TimeoutError, AssertionError) as error:
        return Ended(type(error).__name__, str(error))
    return Ended()


def fits(end: str, ended: list[Ended]) -> bool:
    """Whether the ranks ended in this way."""
    errors = [rank for rank in ended if rank.kind]
    if end == "ok":
        return not errors
    words = next(text for start, text in TEXTS.items() if end.startswith(start))
    found = any(re.search(words, rank.text, re.DOTALL) for rank in errors)
    return found and (not end.startswith("named") or len(errors) == len(ended))


# Ctrl-C is tests/faults/test_user_code.py's; recomputation is inside backward, which has its own.
SPOKEN = [s for s in SCENARIOS if not any(set(text) & set("*R") for text in s.texts)]


@pytest.mark.parametrize("scenario", SPOKEN, ids=lambda scenario: scenario.name)
@pytest.mark.ranks(1, init=False)
def test_real_ranks_end_as_the_model_says(scenario: Scenario, tmp_path: Path, disk: Path) -> None:
    def body() -> Report:
        return Report("ok", tuple(speak(scenario, tmp_path, disk)))

    foreign = any(end.endswith("foreign barrier") for end in scenario.ends)
    env = {"FSDPC_TIMEOUT_S": DEADLINE_S} if foreign else {}
    outcome = run_forked(body, len(scenario.texts), sys.stdout.write, timeout=120, env=env)
    assert not outcome.failures, outcome.describe()
    ended = [Ended(*report.value) for report in outcome.reports]
    assert any(fits(end, ended) for end in scenario.ends), ended
