"""Notebook display of small objects such as tensors, meshes, differences and load reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fsdpc import _core
from fsdpc.display.svg import PALETTE, rect, size, table, text
from fsdpc.display.svg import picture as svg

if TYPE_CHECKING:
    from fsdpc.sharding.mesh import DeviceMesh

#: Describes objects of lower packages, which do not import what describes them.
_DRAWN: dict[str, Callable[[Any], str]] = {}

CORNER = 6  # rows and columns shown of a tensor
ROWS, COLUMNS = 16, 16  # of a mesh


def draws(what: str, draw: Callable[[Any], str]) -> None:
    """Register ``draw``, which returns the HTML or text that :func:`drawn` shows for ``what``."""
    _DRAWN[what] = draw


def drawn(what: str, value: Any) -> str:
    """Render an object with the function that :func:`draws` registered for its kind."""
    return _DRAWN[what](value)


def tensor(t: _core.Tensor) -> str:
    """Describe a tensor and show the corner values of its last two dimensions."""
    words = [f"{type(t).__name__} {t.dtype.name} {tuple(t.shape)}", size(t.nbytes), t.device]
    words += ["requires_grad"] * t.requires_grad
    unit = getattr(t, "_unit", None)
    if unit is not None:
        return _lines(" · ".join(words), _owned(t, unit))
    if t.is_deferred:
        return _lines(" · ".join(words), "deferred: it has no memory yet")
    if t.ndim == 0:
        return _lines(" · ".join(words), f"{t.item():.6g}")
    part = t.detach()
    for _ in range(t.ndim - 2):
        part = part[0] if part.shape[0] else part.reshape(0, 0)
    if 0 in part.shape:
        return _lines(" · ".join(words), "no elements")
    values = (part if part.ndim == 2 else part.reshape(1, -1))[:CORNER, :CORNER].numpy()
    rows, columns = part.shape if part.ndim == 2 else (1, part.shape[0])
    cells = [[f"{value:.6g}" for value in row.tolist()] for row in values]
    if columns > CORNER:
        cells = [[*row, "…"] for row in cells]
    if rows > CORNER:
        cells.append(["…"] * len(cells[0]))
    where = f"[{', '.join(['0'] * (t.ndim - 2))}]" if t.ndim > 2 else ""
    return _lines(" · ".join(words), where, table((), cells, range(CORNER + 1)))


def _owned(t: Any, unit: _core.Unit) -> str:
    _, _, first, numel, *_ = _core.unit_places(unit)[t._index]
    where = f"parameter '{t._name}' of unit '{unit.name}', over {unit.mesh_shape[1]} ranks"
    if not numel:
        return f"{where}; this rank owns none of it"
    return f"{where}; this rank owns elements {first} to {first + numel - 1}"


def mesh(m: DeviceMesh) -> str:
    """Draw a mesh with one row per shard group."""
    replicate, shard = (1, *m.shape)[-2:]
    me = None
    if all(comm.size == n for comm, n in zip(m._comms, m.shape, strict=True)):
        me = (m.get_local_rank(0) if m.ndim == 2 else 0, m.get_local_rank(m.ndim - 1))
    rows, columns = min(replicate, ROWS), min(shard, COLUMNS)
    parts = [text(16, 26, f"{m!r} on {m.device_type}", "h"),
             text(16, 44, "a row shares shards, a column holds the same; this rank is outlined",
                  "f")]  # fmt: skip
    for r in range(rows):
        for s in range(columns):
            x, y, colour = 16 + 52 * s, 56 + 26 * r, s % len(PALETTE)
            rank = r * shard + s
            told = f"rank {rank}: replica {r}, shard {s}"
            parts.append(rect(x, y, 48, 22, f"r{colour}", told))
            parts.append(text(x + 24, y + 15, str(rank), f"m t{colour}"))
            if (r, s) == me:
                parts.append(rect(x, y, 48, 22, "o", more=' stroke-width="3"'))
    high = 56 + 26 * rows
    if rows < replicate or columns < shard:
        parts.append(text(16, high + 14, f"and more, {replicate * shard} ranks together", "f"))
        high += 22
    return svg(high + 8, repr(m), parts)


def fields(
    title: str,
    values: Mapping[str, object],
    head: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    end: str = "",
) -> str:
    """Return HTML with a title, a table of names and values, a second table, and a closing line."""
    pairs = table((), [(name, str(value)) for name, value in values.items()])
    return _lines(title, pairs, table(head, rows) if rows else "", end)


def _lines(*lines: str) -> str:
    parts = [line if line.startswith("<table>") else f"<div>{escape(line)}</div>"
             for line in lines if line]  # fmt: skip
    return f"<div>{''.join(parts)}</div>"
