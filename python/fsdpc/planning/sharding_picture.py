"""Draws a sharding layout, with one strip per parameter, coloured by owning rank.

To keep pictures of large models readable, identical neighbours are drawn once. With many ranks,
each piece of a strip represents several ranks, which its tooltip lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from fsdpc.display.svg import CHAR, PALETTE, WIDTH, rect, short, size, text
from fsdpc.display.svg import picture as svg

if TYPE_CHECKING:
    from fsdpc.planning.layout import ParameterLayout, Piece, ShardingLayout, UnitLayout

LABELS, STRIP, ROW = 300, 440, 19  # in pixels: widths of names and of a strip, height of a line
PIECES, STRIPS = 4000, 400  # maximum numbers in a picture
INDENT = 14


class Folded(NamedTuple):
    """A drawing that represents all units in ``names``, with equal parameters and inner units."""

    unit: UnitLayout
    names: tuple[str, ...]
    inside: tuple[Folded, ...]
    depth: int


def picture(layout: ShardingLayout) -> str:
    """Return an SVG image of a layout."""
    lines = list(_flat(_folded(layout.units)))
    n_strips = min(STRIPS, sum(len(each.unit.parameters) + 1 for each in lines))
    limit = max(8, min(64, PIECES // max(1, n_strips)))  # pieces per strip
    ranks = layout.mesh[1]
    together = -(-ranks // limit)
    parts = [text(16, 26, _title(layout), "h"), text(16, 44, _owners(layout, together), "f")]
    legend = _legend(layout, together)
    parts += legend
    y, left = 84.0 if legend else 60.0, STRIPS
    for each in lines:
        parts += _header(each, y)
        y += ROW + 4
        shown = each.unit.parameters[: max(0, left)]
        left -= len(shown)
        for p in shown:
            parts += _strip(layout, p, each.depth, y, together)
            y += ROW
        if rest := each.unit.parameters[len(shown) :]:
            held = size(sum(p.nbytes for p in rest))
            parts.append(text(16 + INDENT * (each.depth + 1), y + 12,
                              f"and {len(rest)} more parameters, {held}", "f"))  # fmt: skip
            y += ROW
        if sum(each.unit.padding):
            parts += _padding(layout, each.unit, each.depth, y, together)
            y += ROW
        y += 6
    return svg(y + 8, _title(layout), parts)


def words(layout: ShardingLayout) -> str:
    """Return a layout as text, with one line per parameter and identical neighbours merged."""
    lines = [_title(layout)]
    for each in _flat(_folded(layout.units)):
        unit, indent = each.unit, "  " * each.depth
        lines.append(f"{indent}unit {_name(each)}: {size(unit.nbytes)}")
        for p in unit.parameters:
            owners = [f"rank {piece.rank} {p.rows(piece).split(' of ')[0]}" for piece in p.pieces]
            shape = f"({', '.join(map(str, p.shape))}{',' * (len(p.shape) == 1)})"
            listed = _some(owners) or "no elements"
            lines.append(f"{indent}  {p.name} {shape} {p.dtype}: {listed}")
        if sum(unit.padding):
            padded = [f"rank {rank} {size(n)}" for rank, n in enumerate(unit.padding) if n]
            lines.append(f"{indent}  padding: {_some(padded)}")
    return "\n".join(lines)


# ---- folding ----


def _folded(units: Sequence[UnitLayout], depth: int = 0) -> tuple[Folded, ...]:
    """Build a tree of units from their names, merging identical neighbours."""
    found = []
    rest = list(units)
    while rest:
        unit = rest.pop(0)
        inside = []
        while rest and (not unit.name or rest[0].name.startswith(f"{unit.name}.")):
            inside.append(rest.pop(0))
        found.append(Folded(unit, (unit.name,), _folded(inside, depth + 1), depth))
    joined = []
    for _, equal in groupby(found, key=_signature):
        same = list(equal)
        joined.append(same[0]._replace(names=tuple(each.unit.name for each in same)))
    return tuple(joined)


def _signature(each: Folded) -> object:
    """Return a key that is equal for units that can be drawn as one."""
    unit = each.unit
    inside = tuple((len(f.names), _signature(f)) for f in each.inside)
    return unit.kind, unit.parameters, unit.shard, inside


def _flat(tree: Sequence[Folded]) -> Iterator[Folded]:
    for each in tree:
        yield each
        yield from _flat(each.inside)


def _name(each: Folded) -> str:
    first, last = each.names[0] or "(model)", each.names[-1]
    many = f" to {last}, x{len(each.names)}" if len(each.names) > 1 else ""
    return f"{first}{many} {each.unit.kind}"


# ---- drawing ----


def _title(layout: ShardingLayout) -> str:
    replicate, shard = layout.mesh
    where = f"{shard} rank{'s' * (shard > 1)}"
    if replicate > 1:
        where = f"{replicate} x {shard} ranks (replicate x shard)"
    n = len(layout.units)
    whole = layout.shard * shard
    share = 100 * layout.padding / whole if whole else 0.0
    return (
        f"{layout.title} over {where}: {size(layout.nbytes)} in {n} unit{'s' * (n > 1)}, "
        f"{size(layout.shard)} a rank, of which {share:.3g} % padding"
    )


def _owners(layout: ShardingLayout, together: int) -> str:
    replicate, shard = layout.mesh
    if shard == 1:
        return "every rank has all rows" if replicate > 1 else "one rank has all rows"
    said = "a strip has a parameter's rows from left to right, in the colour of their rank"
    if together > 1:
        said += f"; neighbours of {together} ranks are one piece"
    elif shard > len(PALETTE):
        said += f"; colours repeat after {len(PALETTE)} ranks"
    if replicate > 1:
        said += f"; rank r and r + {shard} hold the same"
    return said


def _legend(layout: ShardingLayout, together: int) -> list[str]:
    shard = layout.mesh[1]
    if together > 1 or not 1 < shard <= len(PALETTE):
        return []
    parts, x = [], 16.0
    for rank in range(shard):
        mine = ", ".join(map(str, _world(layout, rank)[:3]))
        mine += ", ..." if layout.mesh[0] > 3 else ""
        label = f"rank{'s' * (layout.mesh[0] > 1)} {mine}"
        parts += [rect(x, 54, 12, 12, f"r{rank}"), text(x + 17, 64, label, "a")]
        x += 30 + CHAR * len(label)
        if x > WIDTH - 90:
            break
    return parts


def _header(each: Folded, y: float) -> list[str]:
    x = 16 + INDENT * each.depth
    unit, times = each.unit, len(each.names)
    label = _name(each)
    parts = [rect(10, y - 1, WIDTH - 20, ROW, "n", more=' rx="3"'),
             text(x, y + 13, short(label, 560 - x), "h", f"unit {label}")]  # fmt: skip
    held = f"{f'{times} x ' if times > 1 else ''}{size(unit.nbytes)}"
    held += f", {size(times * unit.shard)} a rank"
    parts.append(text(WIDTH - 16, y + 13, held, "e"))
    return parts


def _strip(
    layout: ShardingLayout, p: ParameterLayout, depth: int, y: float, together: int
) -> list[str]:
    x = 16 + INDENT * (depth + 1)
    shape = "x".join(map(str, p.shape)) or "1"
    room = LABELS - x - CHAR * (len(shape) + 1)
    what = f"{p.name} ({shape}) {p.dtype}, {size(p.nbytes)}"
    parts = [text(x, y + 13, short(p.name, room), "", what),
             text(LABELS, y + 13, shape, "f e"),
             text(WIDTH - 16, y + 13, size(p.nbytes), "e"),
             text(LABELS + STRIP + 20, y + 13, p.dtype, "f")]  # fmt: skip
    at = LABELS + 12
    if not p.numel:
        return [*parts, text(at, y + 13, "no elements", "f")]
    for number, group in groupby(p.pieces, key=lambda piece: piece.rank // together):
        run = list(group)
        begin, end = run[0].first, run[-1].first + run[-1].numel
        width = STRIP * (end - begin) / p.numel
        colour = number % len(PALETTE)
        left = at + STRIP * begin / p.numel
        parts.append(rect(left, y + 1, width, ROW - 3, f"r{colour}", _told(layout, p, run)))
        label = "-".join(map(str, dict.fromkeys((run[0].rank, run[-1].rank))))
        if layout.mesh[1] > 1 and width > CHAR * len(label) + 4:
            parts.append(text(left + width / 2, y + 13, label, f"a m t{colour}"))
    return parts


def _told(layout: ShardingLayout, p: ParameterLayout, run: list[Piece]) -> str:
    """Return the tooltip for pieces owned by one rank or by a range of ranks."""
    first, last = run[0].rank, run[-1].rank
    held = size(sum(piece.numel for piece in run) * p.itemsize)
    rows = p.rows(run[0]._replace(numel=sum(piece.numel for piece in run)))
    if first == last:
        owners = f"{_ranks(layout, first)} own{'s' * (layout.mesh[0] == 1)}"
    else:
        owners = f"ranks {first} to {last} own"
        held += f", {size(run[0].numel * p.itemsize)} each"
    return f"{p.name}: {owners} {rows}, {held} of {p.dtype}"


def _padding(
    layout: ShardingLayout, unit: UnitLayout, depth: int, y: float, together: int
) -> list[str]:
    """Return a strip of the unit's shards, end to end, with the padding highlighted."""
    x, at = 16 + INDENT * (depth + 1), LABELS + 12
    total = sum(unit.padding)
    share = 100 * total / (unit.shard * layout.mesh[1])
    parts = [text(x, y + 13, "padding", "f", "elements of shards that belong to no parameter"),
             rect(at, y + 5, STRIP, ROW - 11, "n"),
             text(LABELS + STRIP + 20, y + 13, f"{share:.3g} %", "f"),
             text(WIDTH - 16, y + 13, size(total), "e f")]  # fmt: skip
    ranks = layout.mesh[1]
    for begin in range(0, ranks, together):
        end = min(ranks, begin + together)
        own = sum(unit.padding[begin:end])
        if not own:
            continue
        colour = begin // together % len(PALETTE)
        width = STRIP * (end - begin) / ranks
        filled = max(1.0, width * own / (unit.shard * (end - begin)))
        who = _ranks(layout, begin) if end - begin == 1 else f"ranks {begin} to {end - 1}"
        parts.append(rect(at + STRIP * end / ranks - filled, y + 5, filled, ROW - 11, f"r{colour}",
                          f"padding of {who}: {size(own)}"))  # fmt: skip
    return parts


def _world(layout: ShardingLayout, rank: int) -> list[int]:
    return [rank + k * layout.mesh[1] for k in range(layout.mesh[0])]


def _ranks(layout: ShardingLayout, rank: int) -> str:
    mine = _world(layout, rank)
    return f"rank{'s' * (len(mine) > 1)} {_some(list(map(str, mine)))}"


def _some(listed: list[str]) -> str:
    if len(listed) <= 8:
        return ", ".join(listed)
    return f"{', '.join(listed[:4])}, ... {len(listed) - 5} more ..., {listed[-1]}"
