"""A model's recorded schedule, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdpc.planning import schedule_picture
from fsdpc.sharding.rules import units_of


class Use(NamedTuple):
    """The computation of a unit: the unit's name and the phase, "forward" or "backward"."""

    unit: str
    phase: str


class Act(NamedTuple):
    """An action of the engine: the unit's name, the action, and its phase.

    ``what`` is "gather" (posted), "forward" or "backward" (the unit computes), "reshard", "reduce"
    (posted: a reduce-scatter over the shard group) or "all_reduce" (posted: over replicas).
    """

    unit: str
    what: str
    phase: str


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The order of units in a step, the prefetch distance, and the engine's actions.

    ``prefetch`` counts uses. ``acts`` are the engine's acts in the last complete step, in order:
    one forward with gradients and its backwards, up to the next forward. With one rank per shard
    group, nothing is gathered, resharded or reduced; with replicas, the only action is
    "all_reduce".

    Two schedules are equal if they have the same order and distance, and the same actions for each
    unit and phase. The comparison ignores when a gather or a sum begins relative to other units,
    because that depends on the distance and on when ranks arrive. ``diff`` describes the first
    difference. A schedule prints as a list and is displayed as a picture in notebooks.

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
        """Return the engine's actions on a unit in one phase, in order."""
        return tuple(a.what for a in self.acts if (a.unit, a.phase) == use)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and not self.diff(other)

    def __hash__(self) -> int:
        return hash((self.uses, self.prefetch))

    def ahead(self, index: int) -> tuple[Use, ...]:
        """Return the uses whose gathers are posted before use ``index`` computes."""
        return self.uses[index + 1 : index + 1 + self.prefetch]

    def diff(self, other: Schedule) -> str:
        """Describe the first difference from another schedule, or return "" if they are equal."""
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
        """Return an image of the actions, for display in notebooks."""
        return schedule_picture.picture(self)

    def __repr__(self) -> str:
        return str(self)  # for the interactive prompt

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
    """Return the schedule recorded in a model's last complete step, which the engine replays.

    Parameters
    ----------
    model : Module
        The outermost sharded module.

    Returns
    -------
    Schedule or None
        None until a step with gradients has completed its backward, and while the engine
        re-records a step that took a different branch.

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
