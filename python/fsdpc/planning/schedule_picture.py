"""Draws a recorded schedule, with one line per unit and the engine's actions in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdpc.display.svg import CHAR, WIDTH, path, rect, short, text
from fsdpc.display.svg import picture as svg

if TYPE_CHECKING:
    from fsdpc.planning.schedule import Schedule

LEFT, RIGHT, ROW = 200, WIDTH - 16, 18
ENDS = 20  # units drawn at each end if there are more than twice this number
COLOURS = {"gather": 4, "forward": 0, "backward": 1, "reshard": 7, "reduce": 3, "all_reduce": 2}


def picture(schedule: Schedule) -> str:
    """Return an SVG image of a step's actions, or of its uses if no actions were recorded."""
    acts = [(a.unit, a.what, a.phase) for a in schedule.acts]
    acts = acts or [(use.unit, use.phase, use.phase) for use in schedule.uses]
    names = list(dict.fromkeys(unit for unit, _, _ in acts))
    shown = names if len(names) <= 2 * ENDS else [*names[:ENDS], *names[-ENDS:]]
    line = {name: number + (number >= ENDS and shown is not names)
            for number, name in enumerate(shown)}  # fmt: skip
    title = (
        f"A step uses units {len(schedule.uses)} times, and gathers {schedule.prefetch} ahead"
    )
    parts = [text(16, 26, title, "h")]
    x = 16.0
    for what, colour in COLOURS.items():
        if any(each == what for _, each, _ in acts):
            parts += [rect(x, 38, 12, 12, f"r{colour}"), text(x + 17, 48, what, "a")]
            x += 34 + CHAR * len(what)
    top = 62.0
    for name, number in line.items():
        y = top + ROW * number
        label = name or "(model)"
        parts.append(text(16, y + 13, short(label, LEFT - 26), "", label))
        parts.append(path(f"M{LEFT} {y + ROW / 2}H{RIGHT}", "l"))
    if shown is not names:
        hidden = f"{len(names) - len(shown)} more units"
        parts.append(text(16, top + ROW * ENDS + 13, hidden, "f"))
    drawn = [(number, *act) for number, act in enumerate(acts) if act[0] in line]
    width = min(20.0, (RIGHT - LEFT) / max(1, len(drawn)))
    for column, (number, unit, what, phase) in enumerate(drawn):
        told = f"{number}: {what} of {unit or '(model)'}"
        told += "" if what == phase else f", for {phase}"
        thin = " q" if width < 4 else ""
        parts.append(rect(LEFT + column * width, top + ROW * line[unit] + 1, max(1.0, width),
                          ROW - 2, f"r{COLOURS[what]}{thin}", told))  # fmt: skip
    rows = len(shown) + (shown is not names)
    return svg(top + ROW * rows + 14, title, parts)
