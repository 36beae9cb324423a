"""Detect and name parameters that were added to a sharded module after ``fully_shard``.

No unit contains such parameters, so their gradients would not be reduced and each rank would train
its own copy. Such parameters come from replaced modules (such as a resized embedding or a new head)
and from adapters. The modules are searched at the first forward, and again at the first forward
after something was registered in one of them. Frozen parameters are allowed, but checked again at
every forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdpc.sharding.rules import Inside, outside_units
from fsdpc.torch._dtensor import ShardedTensor, agree, attributes_of

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

_inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Registered:
    """Counts the modules and parameters that were registered inside units."""

    count = 0


def _note(module: nn.Module, name: str, value: Any) -> Any:
    """Count a registration; a DTensor in place of a parameter of its shape is copied into it.

    So are its attributes, in which frameworks record, for example, that it has been initialised.
    """
    if module not in _inside:
        return None
    held = module._parameters.get(name)
    home = held.home() if isinstance(held, ShardedTensor) else None
    if home is not None and isinstance(value, DTensor) and value is not held:
        if held.shape == value.shape and held.dtype is value.dtype:  # type: ignore[union-attr]
            alike = agree(held._spec, value._spec)  # type: ignore[union-attr]
            held.data = value.detach() if alike else value.detach().full_tensor()  # type: ignore[union-attr]
            home[0].trust(home[1])
            held.__dict__.update(attributes_of(value))  # type: ignore[union-attr]
            return held.requires_grad_(value.requires_grad)  # type: ignore[union-attr]
    Registered.count += 1
    return None


def watch(state: UnitState, inside: Inside) -> None:
    """Record where the modules hold a unit's sharded and ignored parameters."""
    for _, m in inside:
        _inside.add(m)
        state.known += [(m._parameters, key) for key, p in m._parameters.items() if p is not None]


def check_late(states: Iterable[UnitState]) -> int:
    """Raise if a trainable parameter was added to these units' modules after sharding.

    Returns
    -------
    int
        The registration count up to which this was checked; -1 if frozen parameters were added.
    """
    frozen = False
    for state in states:
        known = {(id(owner), key) for owner, key in state.known}
        seen: set[int] = set()
        for top in state.modules:
            for path, m in outside_units(top, "", seen):
                for key, p in m._parameters.items():
                    if p is None or (id(m._parameters), key) in known:
                        continue
                    if p.requires_grad or hasattr(p, "fsdpc"):
                        raise RuntimeError(
                            f"parameter '{path}{key}' {tuple(p.shape)} of unit "
                            f"'{state.unit.name}' came after fully_shard(), so no unit holds it "
                            "there and each rank would train its own: add or replace modules "
                            "before fully_shard(), or freeze it, requires_grad_(False)"
                        )
                    frozen = True
    return -1 if frozen else Registered.count


register_module_module_registration_hook(_note)
register_module_parameter_registration_hook(_note)
