"""Draws a step, with lanes of operations above the memory in use, on one time axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fsdpc.display.svg import CHAR, WIDTH, path, rect, short, size, text
from fsdpc.display.svg import picture as svg

if TYPE_CHECKING:
    from fsdpc.planning.timeline import Span, Timeline

LEFT, RIGHT = 112, 740  # ends of the time axis
LANE, HIGH = 22, 200  # pixels of a lane, and of the memory
SMALLEST = 0.7  # minimum width of a shape in pixels: narrower neighbours are merged
LANES = {"compute": "computes", "wait": "waits", "gather": "gathers", "reduce": "reduces",
         "free": "frees"}  # fmt: skip
COLOURS = {"forward": 0, "backward": 1, "recompute": 6, "optimizer": 2, "gather": 4, "reduce": 3,
           "all_reduce": 7, "reshard": 7}  # fmt: skip
WAITS = 5
HEAD = ("", "a", "b", "b - a")

Row = tuple[str, float, float, str]


def picture(timelines: Sequence[Timeline], rows: Sequence[Row] = ()) -> str:
    """Return an SVG image of timelines on common axes, with a table of rows."""
    step = max(each.step for each in timelines) or 1e-9
    most = max(max(each.peak, _line(each)) for each in timelines) or 1
    parts: list[str] = []
    y = 10.0
    for number, each in enumerate(timelines):
        letter = f"{HEAD[1 + number]}: " if len(timelines) > 1 else ""
        parts += _one(each, y, step, most * 1.06, letter)
        y += 62 + LANE * len(LANES) + HIGH + 26
    y += 6
    for number, line in enumerate((HEAD, *map(cells, rows)) if rows else ()):
        style = "h" if number == 0 else ""
        if number % 2:
            parts.append(rect(10, y + 1, 700, 19, "n", more=' rx="3"'))
        parts.append(text(16, y + 15, line[0], style))
        parts += [text(340 + 180 * k, y + 15, cell, f"{style} e".strip())
                  for k, cell in enumerate(line[1:])]  # fmt: skip
        y += 19
    return svg(y + 6, "; ".join(map(_headline, timelines)), parts)


def cells(row: Row) -> tuple[str, str, str, str]:
    """Format one row of a comparison: its name, both numbers, and their difference."""
    name, a, b, unit = row
    shown = {"s": _milliseconds, "B": size, "": lambda n: f"{n:,.0f}"}[unit]
    sign = "" if a == b else "+" if b > a else "-"
    return name, shown(a), shown(b), sign + shown(abs(b - a))


def _line(each: Timeline) -> float:
    """Return the limit plus the other ranks' share of the parameter buffer, or 0 if unlimited."""
    return each.limit + each.shared if each.limit else 0.0


def _headline(each: Timeline) -> str:
    return f"{each.title}: {_milliseconds(each.step)}, peak {size(each.peak)}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms" if seconds < 10 else f"{seconds:,.4g} s"


def _one(each: Timeline, top: float, step: float, most: float, letter: str) -> list[str]:
    scale = (RIGHT - LEFT) / step
    said = f"a step takes {_milliseconds(each.step)}, and a rank holds at most {size(each.peak)}"
    said += f", with the buffer that {each.sharing_ranks} ranks share" if each.shared else ""
    parts = [text(16, top + 16, letter + short(each.title, WIDTH - 40), "h", each.title),
             text(16, top + 34, f"{said} ({each.peak:,} bytes)", "f")]  # fmt: skip
    y = top + 48
    for lane, label in LANES.items():
        parts.append(text(LEFT - 10, y + 13, label, "f e"))
        parts.append(rect(LEFT, y, RIGHT - LEFT, LANE - 4, "n"))
        for begin, end, run in _merged([s for s in each.spans if s.lane == lane], scale):
            parts += _span(lane, LEFT + begin * scale, max(1.0, (end - begin) * scale), run, y)
        y += LANE
    parts += _keys(each, top + 48)
    parts += _memory(each, y + 6, scale, most)
    parts += _times(step, y + 6 + HIGH, scale)
    return parts


def _merged(spans: list[Span], scale: float) -> Iterator[tuple[float, float, list[Span]]]:
    """Yield (begin, end, spans), merging spans of the same kind that are too narrow to draw."""
    run: list[Span] = []
    for span in sorted(spans, key=lambda s: s.begin):
        narrow = (span.end - span.begin) * scale < SMALLEST
        fits = run and narrow and run[-1].what == span.what
        if fits and (span.end - run[0].begin) * scale < 3 * SMALLEST:
            run.append(span)
            continue
        if run:
            yield run[0].begin, run[-1].end, run
        run = [span]
    if run:
        yield run[0].begin, run[-1].end, run


def _span(lane: str, x: float, width: float, run: list[Span], y: float) -> list[str]:
    first = run[0]
    colour = WAITS if lane == "wait" else COLOURS[first.what]
    what = f"waits for {first.what}" if lane == "wait" else first.what
    if len(run) > 1:
        told = f"{len(run)} x {what}, from {_milliseconds(first.begin)} on"
    else:
        unit = "" if lane == "wait" else f" {first.unit or '(model)'}"
        told = f"{what}{unit}: {_milliseconds(first.begin)}"
        if first.end > first.begin:
            told += f" to {_milliseconds(first.end)}"
        told += f", {size(first.bytes)}" if first.bytes else ""
    if lane == "free":
        width = max(2.0, width)
    thin = " q" if width < 4 else ""
    parts = [rect(x, y, width, LANE - 4, f"r{colour}{thin}", told)]
    label = first.unit.rpartition(".")[2]
    if lane == "compute" and len(run) == 1 and label and width > CHAR * len(label) + 4:
        parts.append(text(x + width / 2, y + 13, label, f"a m t{colour}"))
    return parts


def _keys(each: Timeline, top: float) -> list[str]:
    """Return a legend for the lane colours, to draw on the right of the lanes."""
    used = {s.what for s in each.spans if s.lane != "wait"}
    shown = [[n for n in ("forward", "backward") if n in used],
             [n for n in ("recompute", "optimizer") if n in used],
             [n for n in ("gather", "reduce") if n in used],
             [n for n in ("all_reduce",) if n in used]]  # fmt: skip
    parts = []
    y = top
    for names in filter(None, shown):
        for k, name in enumerate(names):
            parts.append(rect(RIGHT + 14 + 82 * k, y + 2, 10, 10, f"r{COLOURS[name]}"))
            parts.append(text(RIGHT + 28 + 82 * k, y + 11, name, "a"))
        y += LANE
    return parts


def _memory(each: Timeline, top: float, scale: float, high: float) -> list[str]:
    bottom, tall = top + HIGH, HIGH / high
    end = LEFT + each.step * scale
    parts = []
    for tick in _ticks(high):
        parts.append(path(f"M{LEFT} {bottom - tick * tall:.1f}H{RIGHT}", "l"))
        parts.append(text(LEFT - 10, bottom - tick * tall + 4, _tick(tick), "f e a"))
    below = 0
    for name, n in each.held.items():
        parts.append(rect(LEFT, bottom - (below + n) * tall, end - LEFT, n * tall, f"c-{name}",
                          f"{name}: {size(n)} ({n:,} bytes), all the time"))  # fmt: skip
        below += n
    parts += _gathered(each, bottom, scale, tall)
    for begin, until, run in _steps(each, scale):
        x, width = LEFT + begin * scale, max(0.3, (until - begin) * scale)
        parts.append(rect(x, bottom - (below + run) * tall, width, run * tall, "c-activation",
                          f"activation: at most {size(run)} ({run:,} bytes) from "
                          f"{_milliseconds(begin)} to {_milliseconds(until)}"))  # fmt: skip
    peak = max(each.activations, key=lambda a: a.bytes, default=None)
    if peak is not None:
        x, y = LEFT + (peak.begin + peak.end) / 2 * scale, bottom - each.peak * tall
        parts.append(path(f"M{x:.1f} {y:.1f}l-4 -7h8z", "k", f"peak: {each.peak:,} bytes",
                          ' style="fill:var(--ink)"'))  # fmt: skip
    if each.limit:
        y = bottom - _line(each) * tall
        over = each.peak - _line(each)
        says = f"limit {size(each.limit)}"
        says += ", with a rank's share of unsharded" if each.shared else ""
        says += f": {size(over)} too much" if over > 0 else ""
        parts += [path(f"M{LEFT} {y:.1f}H{RIGHT}", kind, says) for kind in ("y", "x")]
        near = y + 14 if y - top < 14 else y - 5
        parts.append(text(RIGHT - 4, near, says, "e b"))
    y = top + 2
    total = [*each.held.items(), ("activation", each.peak - below)]
    for name, n in reversed([(name, n) for name, n in total if n]):
        parts.append(rect(RIGHT + 14, y + 2, 10, 10, f"c-{name}"))
        parts.append(text(RIGHT + 28, y + 11, name))
        parts.append(text(WIDTH - 12, y + 11, size(n), "e"))
        y += 17
    if any(g.bytes for g in each.gathered):
        parts.append(rect(RIGHT + 14, y + 2, 10, 10, "r0"))
        parts.append(text(RIGHT + 28, y + 11, "of unsharded: in use"))
        most = size(max(g.bytes for g in each.gathered))
        parts.append(text(WIDTH - 12, y + 27, f"at most {most}", "e f"))
    return parts


def _gathered(each: Timeline, bottom: float, scale: float, tall: float) -> list[str]:
    """Return an outline of the gathered parameters in use, to draw inside the parameter buffer."""
    if not any(g.bytes for g in each.gathered):
        return []
    points = [f"M{LEFT} {bottom:.1f}"]
    for g in each.gathered:
        points.append(f"H{LEFT + g.begin * scale:.1f}V{bottom - g.bytes * tall:.1f}")
    points.append(f"H{LEFT + each.step * scale:.1f}V{bottom:.1f}z")
    return [path("".join(points), "r0", "unsharded parameters in use")]


def _steps(each: Timeline, scale: float) -> Iterator[tuple[float, float, int]]:
    """Yield (begin, end, peak) of activation bytes, merging intervals too narrow to draw."""
    begin = end = 0.0
    most = 0
    for a in each.activations:
        if a.end * scale - begin * scale < SMALLEST:
            end, most = a.end, max(most, a.bytes)
            continue
        if end > begin:
            if (end - begin) * scale < SMALLEST:
                a = a._replace(begin=begin, bytes=max(most, a.bytes))
            else:
                yield begin, end, most
        begin, end, most = a
        if (end - begin) * scale >= SMALLEST:
            yield begin, end, most
            begin, most = end, 0
    if end > begin:
        yield begin, end, most


def _ticks(most: float) -> Iterable[float]:
    """Return round byte counts for the axis: 0 and at most five more."""
    unit = next(u for u in (2**40, 2**30, 2**20, 2**10, 1) if most >= u or u == 1)
    step = _round(most / unit / 5) * unit
    return [k * step for k in range(int(most / step) + 1)]


def _tick(n: float) -> str:
    words = size(n).split()
    return f"{float(words[0].replace(',', '')):g} {words[1]}" if n else "0"


def _times(step: float, y: float, scale: float) -> list[str]:
    parts = [path(f"M{LEFT} {y:.1f}H{RIGHT}", "l")]
    each = _round(step * 1e3 / 6) / 1e3
    for k in range(int(step / each) + 1):
        x = LEFT + k * each * scale
        parts.append(path(f"M{x:.1f} {y:.1f}v5", "l"))
        label = f"{1e3 * k * each:,.6g}" + (" ms" if k == 0 else "")
        parts.append(text(x, y + 18, label, "f m a"))
    return parts


def _round(value: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least ``value``."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(k * power for k in (1, 2, 5, 10) if k * power >= value * (1 - 1e-9))
