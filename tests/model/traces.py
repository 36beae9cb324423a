"""Whether what ranks were seen to do is a run of the model.

Every rank's events stand in its own order, each with the moments at which it began and ended. The
events are a run of the model if they can be put into one order that (1) keeps every rank's own, (2)
puts what ended before something else began in front of it, and (3) the model can take, seeing what
the rank saw. Steps that nobody sees (a write to the own slice) may come whenever the model lets
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .protocol import Event, Machine, Named, Programs, World, Wrong

SILENT = {"begin_write", "end_write", "meet", "leave", "drop", "may step"}

# A library's error, by words in it, and the model's.
ERRORS = {
    "ranks_disagree_in_epoch": "epochs disagree",
    "ranks_disagree_on_the_order": "epochs crossed",
    "abandoned_epoch": "epoch abandoned",
    "abandoned_it": "operation abandoned",
    "ranks_disagree_in_operation": "operations disagree",
    "holds_a_unit_by_unshard": "weights changed while a unit is held",
    "a_forward_with_gradients_of": "a forward with gradients inside hold",
    "an_optimizer_stepped_inside": "an optimizer stepped inside hold",
    "changed_between_forward_and_backward": "weights changed between forward and backward",
}


class Seen(NamedTuple):
    """An event of a rank: what it was, between which moments, what it saw."""

    rank: int
    name: str
    root: str
    begin: int
    end: int
    seen: tuple[int, ...] = ()

    @property
    def error(self) -> str:
        """The model's name for an error; "" for what is none."""
        return next((ours for words, ours in ERRORS.items() if words in self.name), "")


    @property
    def told(self) -> bool:
        """Whether it is another rank's error, which may end this one anywhere."""
        return bool(re.match(r"!rank_\d+:_", self.name))


Trace = tuple[tuple[Seen, ...], ...]  # by rank


def parse(lines: Iterable[str], size: int) -> Iterator[Trace]:
    """The traces that record_traces.c printed."""
    ranks: list[list[Seen]] = [[] for _ in range(size)]
    for line in lines:
        word, *fields = line.split()
        if word == "end":
            yield tuple(tuple(events) for events in ranks)
            ranks = [[] for _ in range(size)]
        elif word == "event":
            rank, name, root, begin, end, *seen = fields
            names = ("first", "second")
            when = int(begin), int(end)
            event = Seen(int(rank), name, names[int(root)], *when, tuple(map(int, seen)))
            ranks[event.rank].append(event)


class Place(NamedTuple):
    """Where a search is: the model's world, and how many events of each rank are explained."""

    world: World
    taken: tuple[int, ...]


def is_run(programs: Programs, trace: Trace) -> bool:
    """Whether the model can do what was seen."""
    trace = tuple(tuple(event for event in events if not event.told) for events in trace)
    machine = Machine(programs)
    first = Place(machine.start(), (0,) * machine.size)
    seen, todo = {first}, [first]
    while todo:
        place = todo.pop()
        if all(place.taken[r] == len(trace[r]) for r in range(machine.size)):
            return True
        for r in range(machine.size):
            try:
                for after in _explained(machine, place, trace, r):
                    if after not in seen:
                        seen.add(after)
                        todo.append(after)
            except Named as error:
                event = _next_event(place, trace, r)
                if event and event.error and str(error).startswith(event.error):
                    return True  # all ranks end here, each after what it had done
            except Wrong:
                pass
    return False


def _next_event(place: Place, trace: Trace, r: int) -> Seen | None:
    return trace[r][place.taken[r]] if place.taken[r] < len(trace[r]) else None


def _explained(machine: Machine, place: Place, trace: Trace, r: int) -> Iterator[Place]:
    """The places after rank r's next step, if the step is what was seen next."""
    event = _next_event(place, trace, r)
    for step, world in machine.successors(place.world, r):
        if step.name in SILENT:
            yield place._replace(world=world)
            continue
        error = world.ranks[r].error
        if event and _matches(step, event, error) and _may_come(place, trace, event):
            taken = (*place.taken[:r], place.taken[r] + 1, *place.taken[r + 1 :])
            yield Place(world, taken)


def _matches(step: Event, event: Seen, refusal: str) -> bool:
    if step.name == "refused":
        return bool(event.error) and refusal.startswith(event.error)
    return step.name == event.name and step.root in ("", event.root) and step.seen == event.seen


def _may_come(place: Place, trace: Trace, event: Seen) -> bool:
    """Nothing that is still to come had ended before this began."""
    pending = (_next_event(place, trace, r) for r in range(len(trace)))
    return all(other.end >= event.begin for other in pending if other is not None)
