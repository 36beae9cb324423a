"""Random programs: what no scenario thought of.

Ranks that do the same must come to a right end; where one rank makes calls of its own that change
no weights, the end is right or an error that names what happened. Short programs are run in every
interleaving, long ones in a random one each.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from .explore import outcomes, walk
from .protocol import Op, Programs
from .scenarios import WORDS, program

CHOICES = "FFEBBNWOLLCTURDHefbowl"
HARMLESS = "ECTe!"  # a rank that does one more of these changes nobody's weights


def random_program(rng: random.Random, length: int) -> list[str]:
    """Words that one rank can say in this order."""
    words: list[str] = []
    graphs, held, hold = {"f": 0, "F": 0}, False, False
    while len(words) < length:
        word = rng.choice(CHOICES)
        forward = "f" if word.islower() else "F"
        if hold:
            words.append(rng.choice("VVX"))
            hold = words[-1] != "X"
            continue
        if word in "BNDRb" and not graphs[forward]:
            continue
        if word in "BNDb":
            graphs[forward] -= 1
        graphs[forward] += word in "Ff"
        if word == "U":
            word, held = ("S" if held else "U"), not held
        if word == "H":
            hold = True
        words.append(word)
    return [*words, *("X" if hold else "")]


def alike(rng: random.Random, length: int, ranks: int) -> Programs:
    """The same on all ranks."""
    return (program("".join(random_program(rng, length))),) * ranks


def apart(rng: random.Random, length: int, ranks: int) -> Programs:
    """One rank makes a call or two more, or leaves some out."""
    words = random_program(rng, length)
    own = list(words)
    for _ in range(rng.randint(1, 2)):
        extra = [i for i, word in enumerate(own) if word in HARMLESS]
        if extra and rng.random() < 0.5:
            own.pop(rng.choice(extra))
        else:
            own.insert(rng.randrange(len(own) + 1), rng.choice(HARMLESS))
    programs: list[tuple[Op, ...]] = [program("".join(words))] * ranks
    programs[rng.randrange(ranks)] = _legal(own)
    return tuple(programs)


def _legal(words: list[str]) -> tuple[Op, ...]:
    """Inside hold() a forward is one without an epoch."""
    legal, hold = [], False
    for word in words:
        hold = (hold or word == "H") and word != "X"
        legal.append("V" if hold and word in "ECT" else word)
    return program("".join(legal))


def kind_of(end: str) -> str:
    """The class of an ending: ok, named, refused, waits, deadlock, wrong."""
    return end.partition(":")[0].partition(" ")[0]


def explore_many(seed: int, count: int, make: object, longest: int) -> Counter[str]:
    """How often programs may end in each class."""
    rng, found = random.Random(seed), Counter()
    for _ in range(count):
        programs = make(rng, rng.randint(4, longest), rng.choice([2, 2, 3]))
        ends = outcomes(programs)
        bad = [end for end in ends if kind_of(end) in ("wrong", "deadlock")]
        assert not bad, f"{bad}: {programs}"
        found.update({kind_of(end) for end in ends})
    return found


def walk_many(seed: int, count: int, make: object) -> Counter[str]:
    """The same for long programs, one interleaving each."""
    rng, found = random.Random(seed), Counter()
    for _ in range(count):
        programs = make(rng, rng.randint(20, 60), rng.randint(2, 4))
        end = walk(programs, rng)
        assert kind_of(end) not in ("wrong", "deadlock"), f"{end}: {programs}"
        found[kind_of(end)] += 1
    return found


def test_words_are_the_scenarios_words() -> None:
    assert set(CHOICES.upper() + HARMLESS.upper()) <= set(WORDS)


def test_ranks_that_do_the_same() -> None:
    found = explore_many(1, 300, alike, longest=9)
    assert set(found) == {"ok", "refused"} and min(found.values()) > 20, found


def test_ranks_that_do_not() -> None:
    found = explore_many(2, 500, apart, longest=9)
    assert set(found) == {"ok", "named", "refused", "waits"}, found
    assert min(found.values()) > 5, found


def test_long_programs() -> None:
    assert walk_many(3, 60, alike)["refused"] > 0
    assert walk_many(4, 60, apart)["named"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 104))
def test_many_more(seed: int) -> None:
    explore_many(seed, 1500, alike, longest=11)
    explore_many(seed, 2500, apart, longest=11)
    walk_many(seed, 300, alike)
    walk_many(seed, 300, apart)
