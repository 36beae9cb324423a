"""The recorded schedule of a model, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpc.planning import schedule_picture
from fsdpc.sharding.rules import units_of


class Use(NamedTuple):
    """A unit computes: its name, and the phase, "forward" or "backward"."""

    unit: str
    phase: str


class Act(NamedTuple):
    """The engine acts on a unit: its name, what it does, and the phase that this is for.

    ``what`` is "gather" (posted), "forward" or "backward" (the unit computes), "reshard", "reduce"
    (posted: a reduce-scatter over the shard group) or "all_reduce" (posted: over replicas).
    """

    unit: str
    what: str
    phase: str


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The order in which a step uses units, how far ahead they are gathered, and what was done.

    ``prefetch`` counts uses. ``acts`` are what the engine did in the last whole step, in order:
    one forward with gradients and the backwards after it, up to the next forward. A shard group of
    one rank gathers, reshards and reduces nothing; over replicas it has "all_reduce" alone.

    Compares equal where order, distance and the acts of each unit in each phase are. When a gather
    or a sum begins beside the other units does not count: it follows from the distance, and from
    when the ranks come. ``diff`` says where two part. Printed it is a list, and in a
    notebook a picture.

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.nn.Sequential(fsdpc.nn.Linear(4, 4), fsdpc.nn.Linear(4, 1))
    >>> for layer in [*model, model]:
    ...     _ = fsdpc.fully_shard(layer)
    >>> model(fsdpc.ones(2, 4)).sum().backward()
    >>> schedule = fsdpc.schedule(model)
    >>> schedule.prefetch, schedule.ahead(0)
    (1, (Use(unit='0', phase='forward'),))
    """

    uses: tuple[Use, ...]
    prefetch: int
    acts: tuple[Act, ...] = ()

    def of(self, use: Use) -> tuple[str, ...]:
        """What the engine did with a unit for a phase, in order."""
        return tuple(a.what for a in self.acts if (a.unit, a.phase) == use)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and not self.diff(other)

    def __hash__(self) -> int:
        return hash((self.uses, self.prefetch))

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
        of_unit = {Use(a.unit, a.phase): None for a in (*self.acts, *other.acts)}
        for use in of_unit:
            mine, theirs = self.of(use), other.of(use)
            if mine != theirs:
                return f"{_show(use)}: {_list(mine)} and {_list(theirs)}"
        return ""

    def _repr_html_(self) -> str:
        """Return a picture of the acts, which notebooks show."""
        return schedule_picture.picture(self)

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows

    def __str__(self) -> str:
        lines = [f"{len(self.uses)} uses a step, gathered {self.prefetch} ahead"]
        for i, use in enumerate(self.uses):
            ahead = ", ".join(f"{u.unit} ({u.phase})" for u in self.ahead(i))
            gathers = f" gathers {ahead}" if ahead else ""
            lines.append(f"{i:4} {use.phase:9}{use.unit:24}{gathers}")
        lines += [f"{len(self.acts)} acts in the last step"]
        lines += [f"{i:4} {a.what:11}{a.unit:24} for {a.phase}" for i, a in enumerate(self.acts)]
        return "\n".join(lines)


def _list(acts: tuple[str, ...]) -> str:
    return ", ".join(acts) or "nothing"


def _show(use: Use | None) -> str:
    return f"{use.phase} of '{use.unit}'" if use else "nothing more"


def schedule(model: Any) -> Schedule | None:
    """Return what the engine recorded of a model's last whole step: the order that it replays.

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

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.nn.Sequential(fsdpc.nn.Linear(4, 4), fsdpc.nn.Linear(4, 1))
    >>> for layer in [*model, model]:
    ...     _ = fsdpc.fully_shard(layer)
    >>> model(fsdpc.ones(2, 4)).sum().backward()
    >>> [(use.unit, use.phase) for use in fsdpc.schedule(model).uses[:2]]
    [('Sequential', 'forward'), ('0', 'forward')]
    """
    units = units_of(model)
    if not units:
        raise ValueError(f"{type(model).__name__} is not sharded, so it has no schedule")
    if not units[0].has_root:
        return None
    uses, acts, prefetch = units[0].schedule()
    if uses is None or acts is None:
        return None
    phases = ("forward", "backward")
    return Schedule(
        tuple(Use(units[i].name, phases[back]) for i, back in uses),
        prefetch,
        tuple(Act(units[i].name, what, phases[back]) for i, what, back in acts),
    )
