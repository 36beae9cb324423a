"""Initialise sharded modules by running their initialisation code on full parameters.

Initialisation code may read values, or use operations that DTensors lack. Parameters are therefore
private full copies inside ``reset_parameters()`` of a unit's modules, inside ``apply(fn)``, and
while adapters are merged. Afterwards, ranks compare their copies (or use rank 0's, with
``sync_module_states``) and keep their own rows. If the ranks' generators are identical, the values
equal those of the plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdpc import _core
from fsdpc.distributed.agree import check_agreement
from fsdpc.torch import _device
from fsdpc.torch._grads import other_comms
from fsdpc.torch._recipe import values_of
from fsdpc.torch._subclasses import Codes
from fsdpc.torch._unit import UnitState, full_value, on_copies, states_of

#: How to fix different values on different ranks.
CURE = (
    "build and shard the same model, with the same seed, on every rank, or pass "
    "sync_module_states=True, which takes rank 0's values"
)


def offer_full(state: UnitState, modules: list[nn.Module]) -> None:
    """Make methods that write a unit's parameters run on full parameters.

    These methods are ``reset_parameters()`` and, in PEFT's adapters, ``merge()`` and ``unmerge()``.
    """
    for m in modules:
        names = ["reset_parameters"]
        if hasattr(type(m), "unmerge") and hasattr(m, "base_layer"):
            names += ["merge", "unmerge"]
        for name in names:
            if callable(getattr(type(m), name, None)) and name not in m.__dict__:
                m.__dict__[name] = partial(_with_full, state, m, name)


def _with_full(state: UnitState, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    units = list({id(s): s for s in (state, *states_of(module))}.values())
    if name != "reset_parameters" and any(s.is_running for s in units):
        raise RuntimeError(
            f"{type(module).__name__}.{name}() inside forward or backward, where weights cannot be "
            "written: call it before (unmerge_adapter() before disable_adapter())"
        )
    base = getattr(module, "base_layer", None)
    if name != "reset_parameters" and isinstance(base, nn.Module):
        for key, p in base.named_parameters():
            info = getattr(p, "fsdpc", None)  # copies in summon_full_params() have none
            if info and p.dtype is torch.uint8 and info._state.layouts[info._index].kind is None:
                raise NotImplementedError(
                    f"{type(module).__name__}.{name}() over '{key}', whose quantised values are "
                    f"sharded: their scales would change too, and {info} keeps its own. Save "
                    "the adapter, and merge it into an unsharded model"
                )
    with full_values(units):
        return getattr(type(module), name)(module, *args, **kwargs)


@contextmanager
def full_values(states: list[UnitState]) -> Iterator[None]:
    """Replace parameters of units with private full copies, and keep their new values; collective.

    This does nothing inside forward and backward, or for units that already use copies.
    """
    states = [s for s in states if not (s.summoned or s.is_running)]
    with on_copies(states, [[_full(s, i) for i in range(len(s.params))] for s in states]) as now:
        yield
        for state, unsharded in zip(states, now(), strict=True):
            _take(state, unsharded)


def _full(state: UnitState, index: int) -> nn.Parameter:
    param = state.params[index]
    if index in state.missing:
        value = torch.full(
            state.shapes[index], float("nan"), dtype=param.dtype, device=_device.home()
        )
    else:
        value = full_value(state, index)
    return state.copy_of(index, value)


def _take(state: UnitState, unsharded: list[nn.Parameter]) -> None:
    found = [
        (i, state.layouts[i].plain(full.detach()))
        for i, full in enumerate(unsharded)
        if i not in state.missing or not full.isnan().all()
    ]
    if not state.recipe.synced:
        lines = [
            f"{state.names[i]} {tuple(full.shape)} {full.dtype} crc32c {checksum(full):08x}"
            f"{_scales(state, i, unsharded[i])}"
            for i, full in found
        ]
        others = other_comms((state, i) for i in range(len(unsharded)))
        check_agreement([state.unit.name, *lines], [*state.comms, *others], CURE)
    for i, full in found:
        state.adopt_scales(i, unsharded[i])
        stored = state.layouts[i].store(full)
        state.unit.write(i, values_of(stored, state.comms, state.recipe.synced))
        state.trust(i)


def _scales(state: UnitState, index: int, full: torch.Tensor) -> str:
    kind = state.layouts[index].kind
    return kind.describe(full) if isinstance(kind, Codes) and type(full) is kind.type else ""


def checksum(full: torch.Tensor) -> int:
    """Return a checksum of a value's bytes, on any device."""
    return _core.crc32c(0, full.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy())
