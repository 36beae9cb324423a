"""What transformers' models read of a sharded model: whether all ranks must run the same forwards.

If so, ranks that have finished in ``generate()`` go on until all have, and encoders that drop
layers at random run them, too. torch's ``fully_shard`` sets the same attributes.
"""

from __future__ import annotations

from torch import nn

from fsdpc.sharding.rules import Inside, outermost
from fsdpc.torch._unit import UnitState, states_of


class _Communicates:
    """False while the weights are held, or while all units of a module are on summoned copies."""

    def __init__(self, state: UnitState, module: nn.Module) -> None:
        self._state = state
        self._module = module

    def __bool__(self) -> bool:
        if outermost(self._state.modules[0])._fsdpc_held:
            return False
        return not all(s.summoned for s in (self._state, *states_of(self._module)))


def keep_ranks_together(state: UnitState, inside: Inside) -> None:
    """Mark transformers' modules in a unit, if ranks shard it."""
    if state.comms[0].size == 1:
        return
    for _, m in inside:
        if any(c.__module__.startswith("transformers.") for c in type(m).__mro__):
            m.__dict__["_is_fsdp_managed_module"] = _Communicates(state, m)
            m.__dict__["_fsdp_use_orig_params"] = True  # or torch.compile refuses the module
