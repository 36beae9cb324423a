"""A training step over time: computation, gathers, reductions, frees, and memory in use.

:func:`fsdpc.simulate` creates timelines from the engine's own schedule and memory plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from fsdpc.display.svg import save
from fsdpc.planning import timeline_picture

if TYPE_CHECKING:
    from fsdpc.planning.clock import Clock
    from fsdpc.planning.memory_plan import MemoryPlan
    from fsdpc.planning.simulate import Simulation

#: Memory classes that are constant during a step, from the bottom of the picture up.
HELD = ("unsharded", "master", "grad", "state", "reduce", "staging")


class Span(NamedTuple):
    """An interval of a step, in seconds from the step's beginning, and any bytes sent in it.

    ``lane`` is "compute" (``what``: forward, recompute, backward, optimizer), "wait" (gather,
    reduce, agree), "gather", "reduce" (reduce, all_reduce) or "free" (reshard; an instant).
    """

    lane: str
    what: str
    unit: str
    begin: float
    end: float
    bytes: float = 0.0


class Activations(NamedTuple):
    """The peak activation bytes between two times in a step, in seconds."""

    begin: float
    end: float
    bytes: int


class Gathered(NamedTuple):
    """Bytes of gathered parameters in use from ``begin`` (seconds); part of ``unsharded``."""

    begin: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Rank 0's step, in seconds and bytes, displayed as a picture in notebooks.

    ``held`` is the bytes, by class, that are constant during the step; ``sharing_ranks`` ranks on a
    host share the parameter buffer. ``limit``, in bytes per rank including its share of the
    parameter buffer, is drawn as a line.
    """

    title: str
    step: float
    spans: tuple[Span, ...] = field(repr=False)
    held: dict[str, int]
    activations: tuple[Activations, ...] = field(repr=False)
    gathered: tuple[Gathered, ...] = field(repr=False)
    sharing_ranks: int = 1
    limit: float | None = None

    @property
    def shared(self) -> float:
        """Bytes of the parameter buffer that are charged to other ranks."""
        return self.held.get("unsharded", 0) * (1 - 1 / self.sharing_ranks)

    @property
    def peak(self) -> int:
        """The peak of all memory in bytes, which equals the memory plan's total."""
        most = max((each.bytes for each in self.activations), default=0)
        return sum(self.held.values()) + most

    def with_limit(self, limit: float | None) -> Timeline:
        """Return this timeline with a line that marks a limit in bytes per rank.

        Raises
        ------
        ValueError
            The limit is not above 0.
        """
        if limit is not None and not limit > 0:
            raise ValueError(f"limit must be above 0 bytes, got {limit!r}")
        return replace(self, limit=limit)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture.

        Parameters
        ----------
        path : path
            ``.svg``, or ``.html`` for a page.

        Raises
        ------
        OSError
            The file cannot be written.
        ValueError
            The file name has another suffix.
        """
        save(path, self.title, self._repr_html_())

    def _repr_html_(self) -> str:
        """Return a picture, for display in notebooks."""
        return timeline_picture.picture([self])

    def __str__(self) -> str:
        lines = [f"{self.title}: {1e3 * self.step:.4g} ms, peak {self.peak:,} bytes"]
        lines += [f"{1e3 * s.begin:12.4f} to {1e3 * s.end:.4f} ms {s.lane:8} {s.what} "
                  f"{s.unit or '(model)'}" for s in self.spans]  # fmt: skip
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The timelines of two simulated steps on the same axes, and their differences.

    ``rows`` lists the compared quantity, both numbers, and their unit: "s", "B", or "" for a count.
    """

    a: Simulation
    b: Simulation
    limit: float | None = None

    @property
    def rows(self) -> tuple[tuple[str, float, float, str], ...]:
        """The compared quantities: times, bytes per rank by category, and traffic."""

        def pair(name: str, read: str, unit: str) -> tuple[str, float, float, str]:
            return name, getattr(self.a, read), getattr(self.b, read), unit

        classes = [name for name in (*HELD, "activation", "file", "pinned", "total")
                   if any(getattr(each.memory, name) for each in (self.a, self.b))]  # fmt: skip
        return (
            pair("step", "step", "s"),
            pair("computing", "compute", "s"),
            pair("waiting", "exposed_total", "s"),
            *((name, getattr(self.a.memory, name) or 0, getattr(self.b.memory, name) or 0, "B")
              for name in classes),
            pair("sent to other hosts", "sent_between", "B"),
            pair("sent inside a host", "sent_inside", "B"),
            pair("messages of a rank", "messages", ""),
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture, as :meth:`Timeline.save` does."""
        save(path, "Two ways to train", self._repr_html_())

    def _repr_html_(self) -> str:
        """Return a picture to display in notebooks."""
        both = [each.timeline.with_limit(self.limit) for each in (self.a, self.b)]
        return timeline_picture.picture(both, self.rows)

    def __str__(self) -> str:
        lines = [f"a: {self.a.title}", f"b: {self.b.title}", ""]
        for cells in (timeline_picture.HEAD, *map(timeline_picture.cells, self.rows)):
            lines.append(f"{cells[0]:22}" + "".join(f"{cell:>18}" for cell in cells[1:]))
        return "\n".join(lines)


def of_clock(
    clock: Clock, step: float, memory: MemoryPlan, sharing_ranks: int, title: str
) -> Timeline:
    """Return the timeline of a recorded step that a clock has played.

    Parameters
    ----------
    clock : Clock
    step : float
        Seconds, including the optimizer's pass at the end.
    memory : MemoryPlan
    sharing_ranks : int
        Number of ranks on a host that share the parameter buffer.
    title : str
    """
    record = clock.record
    names = record.units
    spans = [*_computing(clock)]
    if step > clock.now:
        spans.append(Span("compute", "optimizer", "", clock.now, step))
    spans += [Span("wait", wait.what, "", wait.begin, wait.end) for wait in clock.waits]
    for op in clock.operations:
        lane = "gather" if op.kind == "gather" else "reduce"
        if op.done:
            spans.append(Span(lane, op.kind, names[op.unit], op.begin, op.end, op.bytes))
    for event, at in zip(record.events, clock.times, strict=True):
        if event.kind == "reshard":
            spans.append(Span("free", "reshard", names[event.unit], at, at))
    ends = [min(step, clock.times[s.at] if s.at < len(clock.times) else clock.now)
            for s in record.samples]  # fmt: skip
    activations = [
        Activations(begin, end, sample.peak)
        for begin, end, sample in zip([0.0, *ends[:-1]], ends, record.samples, strict=True)
    ]
    if step > ends[-1]:
        activations.append(Activations(ends[-1], step, record.samples[-1].now))
    held = {name: getattr(memory, name) for name in HELD if getattr(memory, name)}
    return Timeline(
        title=title, step=step, spans=tuple(spans), held=held, gathered=tuple(_gathered(clock)),
        activations=tuple(activations), sharing_ranks=sharing_ranks,
    )  # fmt: skip


def _computing(clock: Clock) -> Iterator[Span]:
    """Yield computation spans, excluding inner units and waits."""
    record, inside, before = clock.record, [], 0.0
    waits = iter(clock.waits)
    wait = next(waits, None)
    for event, now in zip(record.events, clock.times, strict=True):
        begin = before
        while wait is not None and wait.begin < now:
            if inside and wait.begin > begin:
                yield Span("compute", *inside[-1], begin, wait.begin)
            begin, wait = wait.end, next(waits, None)
        if inside and now > begin:
            yield Span("compute", *inside[-1], begin, now)
        before = now
        phase = {"forward": "recompute" if event.backward else "forward", "backward": "backward"}
        kind = event.kind.removesuffix("_end")
        if kind in phase:
            one = phase[kind], record.units[event.unit]
            if kind == event.kind:
                inside.append(one)
            elif one in inside:
                inside.remove(one)


def _gathered(clock: Clock) -> Iterator[Gathered]:
    whole: dict[int, int] = {}
    yield Gathered(0.0, 0)
    for event, now in zip(clock.record.events, clock.times, strict=True):
        if event.kind == "gather":
            whole[event.unit] = event.bytes
        elif event.kind != "reshard" or whole.pop(event.unit, None) is None:
            continue
        yield Gathered(now, sum(whole.values()))
