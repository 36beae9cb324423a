"""The recorded schedule of a model, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpc.fsdp_module import units_of


class Use(NamedTuple):
    """A unit computes: its name, and the phase, "forward" or "backward"."""

    unit: str
    phase: str


@dataclass(frozen=True)
class Schedule:
    """The order in which a step uses units, and how far ahead they are gathered.

    Compares equal where order and distance are; ``diff`` says where two part.
    """

    uses: tuple[Use, ...]
    prefetch: int

    def ahead(self, index: int) -> tuple[Use, ...]:
        """Uses whose gathers begin before use ``index`` computes."""
        return self.uses[index + 1 : index + 1 + self.prefetch]

    def diff(self, other: Schedule) -> str:
        """Say where another schedule first differs; empty if it does not."""
        if self.prefetch != other.prefetch:
            return f"prefetch {self.prefetch} and {other.prefetch}"
        for i in range(max(len(self.uses), len(other.uses))):
            a = self.uses[i] if i < len(self.uses) else None
            b = other.uses[i] if i < len(other.uses) else None
            if a != b:
                return f"use {i}: {_show(a)} and {_show(b)}"
        return ""

    def __str__(self) -> str:
        lines = [f"{len(self.uses)} uses a step, gathered {self.prefetch} ahead"]
        for i, use in enumerate(self.uses):
            ahead = ", ".join(f"{u.unit} ({u.phase})" for u in self.ahead(i))
            gathers = f" gathers {ahead}" if ahead else ""
            lines.append(f"{i:4} {use.phase:9}{use.unit:24}{gathers}")
        return "\n".join(lines)


def _show(use: Use | None) -> str:
    return f"{use.phase} of '{use.unit}'" if use else "nothing more"


def schedule(model: Any) -> Schedule | None:
    """Return what the engine recorded of a model's last whole step, which it replays.

    Parameters
    ----------
    model : Module
        The outermost sharded module.

    Returns
    -------
    Schedule or None
        None until a step with gradients has run to the end of its backward, and while a step that
        took another branch is being recorded anew.

    Raises
    ------
    ValueError
        The module is not sharded.
    """
    units = units_of(model)
    if not units:
        raise ValueError(f"{type(model).__name__} is not sharded, so it has no schedule")
    if not units[0].has_root:
        return None
    uses, prefetch = units[0].schedule()
    if uses is None:
        return None
    return Schedule(
        tuple(Use(units[i].name, "backward" if back else "forward") for i, back in uses), prefetch
    )
