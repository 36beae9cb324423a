"""Weights that a model's forward reads after another module of their unit has run.

TRL's losses read the head's weight, and the head itself never runs. Accelerate shards it in one
list with the last norm, which runs before. The unit's unsharded parameters therefore stay in the
modules until a sharded module is entered, the outermost forward ends or a backward begins. The
sharded weight would be gathered a second time, and its full gradient summed over ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState


class Readable:
    """The units of a model whose unsharded parameters are in the modules, although none runs."""

    def __init__(self) -> None:
        self._states: list[UnitState] = []

    def show(self, state: UnitState) -> None:
        """Put a gathered unit's unsharded parameters into its modules, unless they are there."""
        if any(owner.get(key) is not state.params[i] for owner, key, i in state.slots):
            return  # unshard() keeps them, or another module of the unit is running
        for owner, key, i in state.slots:
            owner[key] = state.unsharded[i]
        self._states.append(state)

    def hide(self) -> None:
        """Put all sharded parameters back."""
        while self._states:
            state = self._states.pop()
            for owner, key, i in state.slots:
                owner[key] = state.params[i]
