"""The HTML page for a plan: its table, and pictures of the fastest choice."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from fsdpc.display.svg import page, size, table
from fsdpc.planning.layout import sharding_layout

if TYPE_CHECKING:
    from fsdpc.planning.planner import Choice, Plans


def summary(plans: Plans, rows: int) -> str:
    """Return a table of the best choices and, if any fits, a timeline of the fastest step."""
    parts = [f"<p>{escape(plans.title)}</p>", _table(plans, rows)]
    best = plans.choices[0]
    if best.simulation is not None:
        parts += [f"<p>{_code(best)}</p>", _timeline(plans, best)]
    return f"<div>{''.join(parts)}</div>"


def page_of(plans: Plans, model: Any, plan: Any, rows: int) -> str:
    """Return an HTML page.

    Parameters
    ----------
    plans : Plans
    model, plan : Any
        The model, and the specification of its units.
    rows : int
        Number of choices in the table.
    """
    best = plans.choices[0]
    layout = sharding_layout(model, best.mesh, plan=plan)
    parts = [f'<p class="f">{escape(plans.title)}</p>', _table(plans, rows)]
    if best.simulation is None:
        parts += ["<h2>Nothing fits</h2>", f"<p>{_code(best)} needs least, {size(best.memory)} of "
                  f"{size(plans.limit)}: {escape(best.reason)}.</p>"]  # fmt: skip
    else:
        parts += [f"<h2>The fastest step</h2><p>{_code(best)}</p>", _timeline(plans, best)]
        parts += ["<h2>Memory of a rank</h2>", best.simulation.memory._repr_html_()]
    parts += ["<h2>Who owns which rows</h2>", layout._repr_html_()]
    other = next((c for c in plans.choices if c.strategy != best.strategy and c.fits), None)
    if best.simulation is not None and other is not None and other.simulation is not None:
        parts += [f"<h2>Beside the fastest of another strategy</h2><p>a: {_code(best)}<br/>"
                  f"b: {_code(other)}</p>",
                  best.simulation.beside(other.simulation, plans.limit)._repr_html_()]  # fmt: skip
    return page(f"Ways to train {layout.title}", parts)


def _table(plans: Plans, rows: int) -> str:
    lines = []
    for c in plans.choices[:rows]:
        lines.append((*c.cells(plans.tokens), c.options, c.reason))
    if left := len(plans.choices) - len(lines):
        lines.append(("", "", "", f"and {left} more", ""))
    head = ("step", "tokens/s", "memory", "options of fsdpc train", "why")
    return table(head, lines, range(3))


def _timeline(plans: Plans, choice: Choice) -> str:
    assert choice.simulation is not None
    return choice.simulation.timeline.with_limit(plans.limit)._repr_html_()


def _code(choice: Choice) -> str:
    return f"<code>fsdpc train {escape(choice.options)}</code>"
