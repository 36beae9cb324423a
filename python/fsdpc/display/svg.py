"""Building blocks for SVG pictures, which use no scripts and suit light and dark pages.

A picture paints its own background, so it is readable in a notebook whose theme differs from the
system's. ``prefers-color-scheme`` sets the variables for text and background. Rank colours are
Okabe and Ito's and class colours are similar, so colour-blind people can tell them apart.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from html import escape
from pathlib import Path

WIDTH = 920
CHAR = 6.9  # pixels of a 12 px character, rounded up

#: Fill colour, and the colour of text on it.
PALETTE = (
    ("#0072b2", "#fff"), ("#e69f00", "#000"), ("#009e73", "#000"), ("#cc79a7", "#000"),
    ("#56b4e9", "#000"), ("#d55e00", "#000"), ("#f0e442", "#000"), ("#6b6b6b", "#fff"),
)  # fmt: skip

#: Memory classes of memory_stats; the darker ones would be too pale on white.
CLASSES = {
    "unsharded": "#4a9fd8", "master": "#dd9200", "grad": "#cc79a7", "state": "#00755a",
    "reduce": "#a79c3a", "staging": "#7d7d7d", "activation": "#b3402e",
}  # fmt: skip

_LIGHT = "--ink:#1f2328;--faint:#59636e;--paper:#fff;--line:#d0d7de;--idle:#e8ecf0;--edge:#fff"
_DARK = (
    "--ink:#e6edf3;--faint:#9aa4af;--paper:#14181e;--line:#3d444d;--idle:#2a3038;--edge:#14181e"
)


def _style() -> str:
    p = ".fsdpc-picture"
    rules = [
        f"{p}{{{_LIGHT};font:12px system-ui,'DejaVu Sans',sans-serif;max-width:100%;height:auto}}",
        f"@media (prefers-color-scheme:dark){{{p}{{{_DARK}}}}}",
        f"{p} text{{fill:var(--ink)}}", f"{p} .f{{fill:var(--faint)}}",
        f"{p} .h{{font-weight:600;font-size:13px}}", f"{p} .e{{text-anchor:end}}",
        f"{p} .m{{text-anchor:middle}}", f"{p} .p{{fill:var(--paper)}}",
        f"{p} .l{{stroke:var(--line);fill:none}}", f"{p} .n{{fill:var(--idle)}}",
        f"{p} .a{{font-size:11px}}",
        f"{p} .b{{font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:4px}}",
        f"{p} .o{{stroke:var(--ink);fill:none}}",
        f"{p} .x{{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:6 4;fill:none}}",
        f"{p} .y{{stroke:var(--paper);stroke-width:3;fill:none}}",
    ]  # fmt: skip
    for number, (fill, text) in enumerate(PALETTE):
        rules += [f"{p} .r{number}{{fill:{fill};stroke:var(--edge);stroke-width:.5}}",
                  f"{p} .t{number}{{fill:{text}}}"]  # fmt: skip
    rules += [f"{p} .q{{stroke:none}}", f"{p} .c-activation{{shape-rendering:crispEdges}}"]
    rules += [f"{p} .c-{name}{{fill:{fill}}}" for name, fill in CLASSES.items()]
    return "".join(rules)


STYLE = _style()


def text(x: float, y: float, words: str, kind: str = "", title: str = "") -> str:
    """Return a line of text; ``kind`` lists CSS classes and ``title`` is shown on hover."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{_number(x)}" y="{_number(y)}"{named}>{inside}{escape(words)}</text>'


def rect(
    x: float, y: float, width: float, height: float, kind: str, title: str = "", more: str = ""
) -> str:
    """Return a rectangle; ``kind`` lists CSS classes and ``title`` is shown on hover."""
    box = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    if not title:
        return f'<rect {box} class="{kind}"{more}/>'
    return f'<rect {box} class="{kind}"{more}><title>{escape(title)}</title></rect>'


def path(points: str, kind: str, title: str = "", more: str = "") -> str:
    """Return a path; ``points`` contains its drawing commands."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<path d="{points}" class="{kind}"{more}>{inside}</path>'


def picture(height: float, title: str, parts: Iterable[str], width: int = WIDTH) -> str:
    """Combine these parts into a picture with a background; screen readers announce ``title``."""
    high = _number(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fsdpc-picture" role="img" '
        f'width="{width}" height="{high}" viewBox="0 0 {width} {high}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'{rect(0, 0, width, height, "p", more=f" rx={_QUOTE}6{_QUOTE}")}{"".join(parts)}</svg>'
    )


_QUOTE = '"'

PAGE_STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
body{{background:var(--paper);color:var(--ink);font:14px/1.5 system-ui,'DejaVu Sans',sans-serif;
max-width:{WIDTH + 20}px;margin:24px auto;padding:0 12px}}
h1{{font-size:20px}} h2{{font-size:16px;margin-top:28px}}
table{{border-collapse:collapse;font-size:13px}} td,th{{border-bottom:1px solid var(--line);
padding:4px 10px;text-align:left;vertical-align:top}}
td.e,th.e{{text-align:right;white-space:nowrap}}
code,pre{{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:12px}}
.f{{color:var(--faint)}}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a complete HTML page that is also well-formed XML."""
    return (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head>'
        '<meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def save(path: str | os.PathLike[str], title: str, drawn: str) -> None:
    """Write a picture to an ``.svg`` file, or to an ``.html`` page with this title."""
    suffix = Path(path).suffix
    if suffix not in (".svg", ".html"):
        raise ValueError(f"a picture is written as .svg or .html, got '{os.fspath(path)}'")
    text = drawn + "\n" if suffix == ".svg" else page(title, [drawn])
    Path(path).write_text(text, encoding="utf-8")


def table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: Container[int] = ()) -> str:
    """Return an HTML table; the columns with these indices are right-aligned."""

    def line(cells: Iterable[str], tag: str) -> str:
        return "".join(
            f"<{tag}{right if i in numbers else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )

    right = ' class="e"'
    titles = list(head)
    begin = f"<thead><tr>{line(titles, 'th')}</tr></thead>" if titles else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table>{begin}<tbody>{body}</tbody></table>"


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, as a whole number or with four significant digits."""
    ms = 1e3 * seconds
    return f"{ms:,.4g} ms" if ms < 9999.5 else f"{ms:,.0f} ms"


def size(n: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= unit:
            return f"{n / unit:,.2f} {name}"
    return f"{n:,.0f} B"


def short(words: str, width: float) -> str:
    """Shorten text to a width in pixels by omitting its middle, if necessary."""
    room = max(4, int(width / CHAR))
    if len(words) <= room:
        return words
    ends = room - 1
    return f"{words[: ends // 3]}…{words[len(words) - (ends - ends // 3) :]}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
