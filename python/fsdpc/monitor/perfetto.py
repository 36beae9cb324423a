"""Draw all ranks' operations as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Each rank is a process. Its tracks, from top to bottom, are the user's marks, host computation,
waits, gathers, and reductions. Spans that overlap within a track are drawn on separate lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fsdpc.monitor.flight import Operation


class Style(NamedTuple):
    """How a kind of operation is drawn: the event that ends it, its track, and its colour."""

    end: str
    track: str
    colour: str
    nests: bool = False


STYLES = {
    "mark": Style("mark_end", "marks", "grey", True),
    "forward": Style("forward_end", "computing", "thread_state_running", True),
    "backward": Style("backward_end", "computing", "rail_animation", True),
    "optim": Style("optim_end", "computing", "yellow", True),
    "wait": Style("wait_end", "waiting", "terrible", True),
    "gather": Style("gather_done", "gathers", "rail_response"),
    "reduce": Style("reduce_done", "reductions", "rail_load"),
    "all_reduce": Style("reduce_done", "reductions", "olive"),
}
_ENDS = frozenset(style.end for style in STYLES.values())
_TRACKS = list(dict.fromkeys(style.track for style in STYLES.values()))


class Span(NamedTuple):
    """An operation with its begin and end times in nanoseconds."""

    begin: int
    end: int
    operation: Operation

    @property
    def kind(self) -> str:
        """The first word of the operation's name, such as "wait" for "wait for gather"."""
        return _kind(self.operation)


def spans(own: Iterable[Operation]) -> tuple[list[Span], list[Operation]]:
    """Pair one rank's begin and end events, in time order; also return unpaired events."""
    found: list[Span] = []
    single: list[Operation] = []
    open_: dict[tuple[str, str], list[Operation]] = {}
    for o in own:
        style = STYLES.get(_kind(o))
        if style and not (style.end == "optim_end" and o.unit):
            open_.setdefault((o.unit, style.end), []).append(o)
        elif o.what in _ENDS:
            begun = open_.get((o.unit, o.what), [])
            while begun:
                found.append(Span(begun[-1].at, o.at, begun.pop()))
                if o.what != "reduce_done":  # reduce_done ends both stages of a reduction
                    break
        else:
            single.append(o)
    return found, single + [o for begun in open_.values() for o in begun]


def events(rank: int, host: str, own: Iterable[Operation]) -> list[dict[str, Any]]:
    """Convert a rank's operations to trace events."""
    found, single = spans(own)
    drawn = [_meta(rank, "process_name", name=f"rank {rank} ({host})"),
             _meta(rank, "process_sort_index", sort_index=rank)]  # fmt: skip
    line = 0
    for track in _TRACKS:
        of_track = [span for span in found if STYLES[span.kind].track == track]
        nests = any(STYLES[span.kind].nests for span in of_track)
        lines = _lines(of_track, nests) or [[]] * (track == "computing")
        for number, row in enumerate(lines):
            name = f"{track} {number + 1}" if number else track
            drawn += [_meta(rank, "thread_name", line, name=name),
                      _meta(rank, "thread_sort_index", line, sort_index=line)]  # fmt: skip
            drawn += [_drawn(span, line) for span in row]
            if track == "computing" and number == 0:
                drawn += [{**_event(o, line), "ph": "i", "s": "t"} for o in single]
            line += 1
    return drawn


def busy(found: Iterable[Span], *kinds: str) -> int:
    """Return the total time, in nanoseconds, during which any span of these kinds was open."""
    total, until = 0, -1
    for begin, end in sorted((s.begin, s.end) for s in found if s.kind in kinds):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def _kind(o: Operation) -> str:
    return o.what.partition(" ")[0]


def _lines(found: list[Span], nests: bool) -> list[list[Span]]:
    """Distribute spans over lines so that none overlap; if `nests` is set, spans may nest."""
    lines: list[tuple[list[Span], list[int]]] = []  # with the ends of the open spans
    for span in sorted(found, key=lambda s: (s.begin, -s.end)):
        line = next((each for each in lines if _fits(span, each[1], nests)), None)
        if line is None:
            line = ([], [])
            lines.append(line)
        line[0].append(span)
        line[1].append(span.end)
    return [row for row, _ in lines]


def _fits(span: Span, ends: list[int], nests: bool) -> bool:
    while ends and ends[-1] <= span.begin:
        ends.pop()
    return not ends or (nests and ends[-1] >= span.end)


def _drawn(span: Span, line: int) -> dict[str, Any]:
    return {**_event(span.operation, line), "ph": "X", "dur": (span.end - span.begin) / 1e3,
            "cname": STYLES[span.kind].colour}  # fmt: skip


def _event(o: Operation, line: int) -> dict[str, Any]:
    what = o.what.removeprefix("mark ").replace("optim", "optimizer").replace("_", " ")
    again = " again" if o.backward and _kind(o) == "forward" else ""  # activations are recomputed
    return {
        "name": f"{what} {o.unit}".strip() + again, "cat": _kind(o), "pid": o.rank, "tid": line,
        "ts": o.at / 1e3, "args": {"epoch": o.epoch, "bytes": o.bytes},
    }  # fmt: skip


def _meta(rank: int, what: str, line: int = 0, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": line, "args": args}
