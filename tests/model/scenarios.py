"""Programs that people write, and how the protocol says they end.

A program is written as words, one rank's after the other's: ``F`` forward with gradients, ``E``
without (evaluation, generation), ``B`` backward of the oldest graph, ``N`` of the newest, ``W``
masters written by something else than an optimizer of ours, ``O`` our optimizer's step, ``L`` one
that goes on behind what comes next, ``D`` a
loss dropped (also by an exception), ``C`` a forward of a child alone, ``R`` recomputation inside
backward, ``U``/``S`` unshard and reshard, ``H``/``X`` enter and leave hold(), ``V`` a forward
without gradients and ``G`` one with, both inside hold(), ``T`` full_tensor, ``|`` a barrier of
ours, ``!`` one of another library. Lower case is the same of a second root. ``*`` behind a word:
Ctrl-C may end any wait of it.
"""

from __future__ import annotations

from typing import NamedTuple

from .protocol import Op, Programs

WORDS = {
    "F": Op("forward", grad=True),
    "E": Op("forward"),
    "C": Op("forward", unit="child"),
    "B": Op("backward"),
    "N": Op("backward", newest=True),
    "W": Op("write"),
    "O": Op("step"),
    "L": Op("late step"),
    "D": Op("drop"),
    "R": Op("recompute"),
    "U": Op("unshard"),
    "S": Op("reshard"),
    "H": Op("hold"),
    "X": Op("release"),
    "V": Op("use"),
    "G": Op("use", grad=True),
    "T": Op("collect"),
    "|": Op("barrier"),
    "!": Op("foreign"),
}


def program(text: str) -> tuple[Op, ...]:
    """The operations that the words say."""
    ops: list[Op] = []
    for word in text.replace(" ", ""):
        if word == "*":
            ops[-1] = ops[-1]._replace(interrupted=True)
        elif word in "|!":
            ops.append(WORDS[word])
        else:
            ops.append(WORDS[word.upper()]._replace(root="first" if word.isupper() else "second"))
    return tuple(ops)


class Scenario(NamedTuple):
    """What it is, every rank's program, and all the ways in which it may end."""

    name: str
    texts: tuple[str, ...]
    ends: tuple[str, ...] = ("ok",)

    @property
    def programs(self) -> Programs:
        """The programs as operations."""
        return tuple(program(text) for text in self.texts)


def alike(name: str, text: str, *ends: str, ranks: int = 2) -> Scenario:
    """All ranks do the same."""
    return Scenario(name, (text,) * ranks, ends or ("ok",))


def apart(name: str, first: str, second: str, *ends: str) -> Scenario:
    """Two ranks that do not."""
    return Scenario(name, (first, second), ends or ("ok",))


STALE = "refused: weights changed between forward and backward"
HELD = "refused: weights changed while a unit is held by unshard()"
EPOCHS = "named: epochs disagree"
OPERATIONS = "named: operations disagree"
LEFT = "named: operation abandoned by a peer"
CROSSED_1 = "named: epochs crossed: a peer began one of second, not of first"
CROSSED_2 = "named: epochs crossed: a peer began one of first, not of second"
NEWER = "wrong: newer weights than were announced are read"
ENDED = "waits for a rank that ended"

SCENARIOS = [
    alike("train, another optimizer", "FBW FBW F"),
    alike("train", "FBO FBO F"),
    alike("train, three ranks", "FBO FBO F", ranks=3),
    alike("train, another optimizer, three ranks", "FBW FBW F", ranks=3),
    alike("accumulate", "FBFBO FB"),
    alike("two forwards, then two backwards", "FFNN O FB"),
    alike("1F1B pipelining", "FFBFBB O FB"),
    alike("loss dropped on all ranks", "FD O FB"),
    alike("a loss that is kept and never used", "FFN O FN"),
    alike("recomputation of the whole root", "FRB O FRB"),
    alike("a child called alone after a step", "FBO C FB"),
    alike("full_tensor between steps", "FBO T FBO T"),
    alike("averaged weights swapped in, evaluation, swapped out", "FBO W E W FB"),
    alike("the same, our optimizer in between", "FBO W E W O F"),
    # Steps that go on behind the next forward.
    alike("train, late", "FBL FBL F"),
    alike("train, late, three ranks", "FBL F", ranks=3),
    alike("late, then evaluation and another step", "FBL L E FBO E"),
    alike("late, then weights are written", "FBL W E W FB"),
    alike("late, and looked at", "FBL T FBL T"),
    alike("late, a child, and the whole", "FBL C FB"),
    alike("late, then unshard and hold", "FBL U S H V X FB"),
    alike("late, two roots", "Ff Bb Ll Ff"),
    apart("late on one rank alone", "FBL FBL F", "FBO FBL F"),
    apart("late, masters written on one rank", "FBL W E FB", "FBL E FB"),
    apart("late, a forward on one rank", "FBL E FB", "FBL FB", LEFT),
    alike("backward after a late step", "FFN L N", STALE),
    alike("unshard held over a late step", "U F B L S", HELD),
    # Graphs that are older than the weights.
    alike("backward after another optimizer's step, not yet published", "FFN W N"),
    alike("backward after our optimizer's step", "FFN O N", STALE),
    alike("backward after weights were written and published", "FFN W E N", STALE),
    alike("recomputation after a step", "FFN O RN", STALE),
    # Two roots.
    alike("teacher and student", "FeBO FeB"),
    alike("GAN: back through both", "Ff bB O FfbB o Ff"),
    alike("GAN: a step of each in turn", "Ff B O Ef b o F"),
    # Crossed epochs are found by one of the two, or by both at once.
    apart("two roots in another order on one rank", "FeB", "eFB", CROSSED_1, CROSSED_2),
    apart("one root's step is missing on one rank", "FfBbOo Ff", "FfBbo Ff", CROSSED_1, CROSSED_2),
    # unshard()
    alike("unshard before forward, as a prefetch", "FBO U F S B"),
    alike("unshard held over a step of ours", "U F B O S", HELD),
    alike("unshard held over another optimizer's step", "U F B W F S", HELD),
    alike("unshard held without any change", "U F B E S FB"),
    apart("unshard on one rank only", "FBO US FB", "FBO FB", EPOCHS),
    apart("held on one rank, written on the other", "E U E S E", "E U S W E E", HELD),
    # Ranks that do not do the same.
    apart("evaluation on one rank, training goes on", "FBO E FB", "FBO FB", LEFT),
    apart("evaluation on one rank at the end", "FBO E", "FBO", ENDED),
    apart("evaluation on one rank, then our barrier", "FBO E | FB", "FBO | FB", LEFT),
    apart(
        "evaluation on one rank, then a foreign barrier", "FBO E ! FB", "FBO ! FB",
        "waits for a rank in a foreign barrier",
    ),
    apart("generation of unequal length, then training", "EEE FB", "EE FB", LEFT),
    apart("generation of unequal length at the end", "FBO EEE", "FBO EE", ENDED),
    apart("our optimizer's step on one rank", "FBO F", "FB F", EPOCHS),
    apart("a missing backward", "FB O", "FD O", LEFT),
    apart("a child called on one rank", "FBO C", "FBO E", EPOCHS),
    apart("an exception in one rank's forward; both go on", "FBO FB", "FD FBO FB", LEFT),
    apart("an exception in one rank's evaluation; both go on", "E FB", "E E FB", LEFT),
    apart("masters written on one rank alone", "E W E FB", "E E FB"),
    # hold()
    alike("hold: no epochs inside", "FBO H VV X FB"),
    apart("hold: evaluation on one rank", "FBO H VV X ! FB", "FBO H X ! FB"),
    apart("hold: generation of unequal length", "H VVV X FB", "H V X FB"),
    alike("hold: gradients inside", "H G", "refused: a forward with gradients inside hold()"),
    alike("hold: a step inside", "H O", "refused: an optimizer stepped inside hold()"),
    apart("hold on one rank", "E H VX FB", "E FB", EPOCHS),
    apart("hold left on one rank later", "H V X FB", "H VV X FB"),
    # Ctrl-C
    apart("Ctrl-C in a forward, both go on alike", "E* FB", "E FB"),
    apart("Ctrl-C in the first forward of a step", "FBO E* FB", "FBO E FB"),
    # The second forward may end while it completes the first one's epoch, before it has its own.
    alike("Ctrl-C everywhere", "W E* E* FB", "ok", LEFT),
    # The others may wait for its slice in a gather that it does not come to any more.
    apart("Ctrl-C in a forward behind a late step", "FBL E* FB", "FBL E FB", "ok", LEFT),
    apart("Ctrl-C, then weights are written", "W E* W E", "W E W E", "ok", NEWER),
    apart("Ctrl-C in unshard", "U* E", "U S E", "ok"),
    apart(
        "Ctrl-C in our optimizer's step on one rank", "FBO* FB", "FBO FB",
        "named: interrupted in an optimizer's step that others may take", "ok",
    ),
]  # fmt: skip
