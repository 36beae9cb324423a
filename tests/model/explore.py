"""Every interleaving of a few ranks' programs, and how each of them ends.

A run ends in one of these ways:

    ok                      all programs ended
    named: ...              an error that all ranks get
    refused: ...            an error that a rank got by itself, all others having ended too
    waits for ...           somebody waits for a rank that will not come, which a deadline names
    deadlock                ranks wait for each other
    wrong: ...              a promise is broken
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .protocol import Event, Machine, Named, Programs, Rules, World, Wrong

MOST_WORLDS = 200_000


def outcomes(programs: Programs, rules: Rules | None = None, most: int = MOST_WORLDS) -> set[str]:
    """How the programs may end, over all interleavings."""
    machine = Machine(programs, rules)
    first = machine.start()
    seen, found, todo = {first}, set(), [first]
    while todo:
        world = todo.pop()
        nexts, ends = _nexts(machine, world)
        found |= ends
        if not nexts and not ends:
            found |= set(_endings(machine, world))
        for _, _, after in nexts:
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if len(seen) > most:
            raise RuntimeError(f"more than {most} worlds: the programs are too long")
    return found


def walk(programs: Programs, rng: random.Random, rules: Rules | None = None) -> str:
    """How one interleaving, chosen at random, ends."""
    machine = Machine(programs, rules)
    world = machine.start()
    while True:
        nexts, ends = _nexts(machine, world)
        if ends:
            return min(ends)
        if not nexts:
            return min(_endings(machine, world))
        world = rng.choice(nexts)[2]


def _nexts(machine: Machine, world: World) -> tuple[list[tuple[int, Event, World]], set[str]]:
    nexts, ends = [], set()
    for r in range(machine.size):
        try:
            for event, after in machine.successors(world, r):
                nexts.append((r, event, after))
        except Named as error:
            ends.add(f"named: {error}")
        except Wrong as error:
            ends.add(f"wrong: {error}")
    return nexts, ends


def _endings(machine: Machine, world: World) -> Iterator[str]:
    """Nobody can move: why?"""
    errors = {rank.error for rank in world.ranks if rank.error}
    waiting = [r for r in range(machine.size) if machine.op_of(world, r) is not None]
    if not waiting:
        for rank in world.ranks:
            if [root.taken for root in rank.roots] != [root.taken for root in world.ranks[0].roots]:
                yield "wrong: ranks took different steps"
        yield from (f"refused: {error}" for error in errors)
        if not errors:
            yield "ok"
        return
    if len(waiting) < machine.size:
        yield "waits for a rank that ended" + (f": {min(errors)}" if errors else "")
        return
    foreign = [r for r in waiting if machine.op_of(world, r).verb == "foreign"]
    yield "waits for a rank in a foreign barrier" if foreign else "deadlock"
