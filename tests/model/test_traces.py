"""What comm_shm and the engine really do, recorded under random delays, is a run of the model."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from .scenarios import SCENARIOS, program
from .traces import Seen, Trace, is_run, parse

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120

SPOKEN = set("FEBNWOLCDUSHXVG|feboOlw ")  # what record_traces.c can do
CHOICES = "FFEBBNWOLLCfebl|"


@pytest.fixture(scope="session")
def recorder() -> Path:
    """The program that records."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import ctest
    finally:
        sys.path.pop(0)
    return ctest.build("plain", [ROOT / "tests" / "model" / "record_traces.c"])[0]


def record(recorder: Path, texts: Sequence[str], seeds: Iterable[int], without: str) -> list[Trace]:
    """A trace for every seed."""
    lines = "".join("\t".join([str(seed), *texts]) + "\n" for seed in seeds)
    done = subprocess.run(
        [recorder, without], input=lines, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return list(parse(done.stdout.splitlines(), len(texts)))


def check(recorder: Path, texts: Sequence[str], seeds: Iterable[int]) -> None:
    """Every trace of these programs is a run of the model."""
    programs = tuple(program(text) for text in texts)
    for trace in record(recorder, texts, seeds, "none"):
        assert is_run(programs, trace), explain(texts, trace)


def explain(texts: Sequence[str], trace: Trace) -> str:
    """All events by the moment they ended."""
    events = sorted((event for rank in trace for event in rank), key=lambda event: event.end)
    start = min(event.begin for event in events)
    shown = [
        f"  {(e.begin - start) / 1e3:9.1f} {(e.end - start) / 1e3:9.1f} us  rank {e.rank}: "
        f"{e.name} {e.root} {e.seen or ''}"
        for e in events
    ]
    return "\n".join([f"not a run of the model: {texts}", *shown])


ENDING = [
    scenario
    for scenario in SCENARIOS
    if all(set(text) <= SPOKEN for text in scenario.texts)
    and not any(end.startswith(("waits", "deadlock", "wrong")) for end in scenario.ends)
]


@pytest.mark.parametrize("scenario", ENDING, ids=lambda scenario: scenario.name)
def test_scenarios(scenario: object, recorder: Path) -> None:
    check(recorder, scenario.texts, range(6))


def random_texts(rng: random.Random, length: int) -> list[str]:
    """A program that all of 2 to 4 ranks run, with weights written by some of them."""
    words: list[str] = []
    graphs = {"f": 0, "F": 0}
    while len(words) < length:
        word = rng.choice(CHOICES)
        if rng.random() < 0.05:
            words += ["H", *rng.choices("VV|", k=rng.randrange(4)), "X"]
        forward = "f" if word.islower() else "F"
        if word in "BNb":
            if not graphs[forward]:
                continue
            graphs[forward] -= 1
        graphs[forward] += word in "Ff"
        words.append(word)
    ranks = rng.randint(2, 4)
    return [
        "".join(word for word in words if word != "W" or rng.random() < 0.7) for _ in range(ranks)
    ]


def check_random(recorder: Path, seed: int, count: int, length: int) -> None:
    rng = random.Random(seed)
    for i in range(count):
        check(recorder, random_texts(rng, length), [seed * 1000 + i])


def test_random_programs(recorder: Path) -> None:
    check_random(recorder, seed=1, count=60, length=14)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200, 210))
def test_many_random_programs(seed: int, recorder: Path) -> None:
    check_random(recorder, seed, count=600, length=24)


TRAIN = ("FBO W E W FB", "FBO W E W FB")


LATE = ("FBL FBL FBL FB",) * 2


@pytest.mark.parametrize(
    "without, texts", [("arrivals", TRAIN), ("publications", TRAIN), ("late", LATE)]
)
def test_traces_of_a_broken_communicator_are_refused(
    without: str, texts: tuple[str, ...], recorder: Path
) -> None:
    """The check sees it when a wait is missing in the library."""
    programs = tuple(program(text) for text in texts)
    traces = record(recorder, texts, range(8), without)
    refused = [trace for trace in traces if not is_run(programs, trace)]
    assert len(refused) >= 4


def changed(trace: Trace, rank: int, at: int, **fields: object) -> Trace:
    """The trace with one event that was otherwise."""
    events = list(trace[rank])
    events[at] = events[at]._replace(**fields)
    return (*trace[:rank], tuple(events), *trace[rank + 1 :])


def find(trace: Trace, rank: int, name: str, nth: int) -> tuple[int, Seen]:
    """The nth event of a rank with this name, and where it stands."""
    return [(i, event) for i, event in enumerate(trace[rank]) if event.name == name][nth]


def test_traces_that_cannot_have_been_are_refused(recorder: Path) -> None:
    programs = tuple(program(text) for text in TRAIN)
    (trace,) = record(recorder, TRAIN, [1], "none")
    assert is_run(programs, trace)
    at, read = find(trace, 0, "read", -1)
    older = tuple(version - 1 for version in read.seen)
    assert not is_run(programs, changed(trace, 0, at, seen=older))
    at, decided = find(trace, 0, "decide", 1)
    assert not is_run(programs, changed(trace, 0, at, seen=(1 - decided.seen[0],)))
    # It went on before the other had arrived.
    _, arrived = find(trace, 1, "arrive", 1)
    early = changed(trace, 1, find(trace, 1, "arrive", 1)[0], begin=decided.end + 1,
                    end=max(decided.end + 2, arrived.end))
    assert not is_run(programs, early)
    # It left out its last publication.
    at, _ = find(trace, 1, "publish", -1)
    assert not is_run(programs, (trace[0], (*trace[1][:at], *trace[1][at + 1 :])))
