"""Draws memory by category for notebooks, as one bar labelled with numbers.

The picture is an SVG image without scripts or styles. Text inherits the page's colour, so it is
readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fsdpc.display.svg import CLASSES

WIDTH, MARGIN, BAR, ROW = 560, 8, 26, 20
FILLS = CLASSES

Part = tuple[str, int]


def picture(title: str, parts: Sequence[Part], more: Sequence[Part] = ()) -> str:
    """Return an SVG image.

    Parameters
    ----------
    title : str
        Title line.
    parts : sequence of (str, int)
        Names from ``FILLS`` and their bytes, which add up to the bar.
    more : sequence of (str, int)
        Memory not in the bar, listed only as numbers.
    """
    total = sum(n for _, n in parts)
    rows = [*parts, ("total", total), *more]
    height = 3 * MARGIN + BAR + ROW * (1 + len(rows))
    words = ", ".join(f"{name} {size(n, total)}" for name, n in rows)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" '
        f'fill="currentColor"><title>{escape(f"{title}: {words}")}</title>',
        _text(MARGIN, MARGIN + 12, title),
    ]
    top, inner = MARGIN + ROW, WIDTH - 2 * MARGIN
    at = float(MARGIN)
    for name, n in parts:
        width = inner * n / total if total else 0.0
        drawn.append(
            f'<rect x="{at:.2f}" y="{top}" width="{width:.2f}" height="{BAR}" '
            f'fill="{FILLS[name]}"><title>{escape(f"{name}: {size(n, total)}")}</title></rect>'
        )
        at += width
    for number, (name, n) in enumerate(rows):
        line = top + BAR + MARGIN + ROW * number + 14
        bold = ' font-weight="bold"' if name == "total" else ""
        if name in FILLS:
            drawn.append(f'<rect x="{MARGIN}" y="{line - 11}" width="12" height="12" '
                         f'fill="{FILLS[name]}"/>')  # fmt: skip
        drawn.append(_text(MARGIN + 20, line, name, bold))
        drawn.append(_text(MARGIN + 240, line, size(n, total), f'{bold} text-anchor="end"'))
        if total and number < len(parts):
            share = f"{n / total:.1%}"
            drawn.append(_text(MARGIN + 320, line, share, ' text-anchor="end"'))
        elif number > len(parts):
            drawn.append(_text(MARGIN + 260, line, "not in the total"))
    return "".join([*drawn, "</svg>"])


def size(n: int, total: int) -> str:
    """Format bytes in the total's unit: GiB from 10 GiB, MiB from 1 MiB, and KiB below that."""
    if total < 2**20:
        return f"{n / 2**10:,.2f} KiB"
    return f"{n / 2**30:,.2f} GiB" if total >= 10 * 2**30 else f"{n / 2**20:,.2f} MiB"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{escape(text)}</text>'
