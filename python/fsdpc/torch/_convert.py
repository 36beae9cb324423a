"""Apply ``.to()``, ``.double()`` and other ``nn.Module._apply`` calls to pieces.

A new dtype changes the layout, so the unit is rebuilt from its parameters, which are gathered and
converted. This is possible only before the first forward, when the units get a common parameter
buffer, and only if no optimizer uses the unit's memory. All other changes are written to the
pieces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fsdpc.torch import _device
from fsdpc.torch._unit import UnitState, full_value, states_of
from fsdpc.torch.policies import core_dtype

Change = Callable[[torch.Tensor], torch.Tensor]


def convert(module: Any, apply: Callable[..., Any], fn: Change, recurse: bool) -> Any:
    """Run ``nn.Module._apply`` and update units; collective if dtypes change.

    Raises
    ------
    NotImplementedError, RuntimeError
        A unit cannot be updated; in this case nothing has changed.
    """
    states = states_of(module)
    bare = [(s, i) for s in states for i, p in enumerate(s.pieces) if p.is_meta]
    emptied = bool(bare) and not fn(torch.empty(0, device="meta")).is_meta
    changing = [s for s in states if _changes(s, fn)]
    for state in changing:
        _check(state)
    for state in states:
        state.torch_unit.follow()
    on_meta = [each for each in _buffers(module) if each[3].is_meta]
    trusted = [(s, set(range(len(s.pieces))).difference(s.written())) for s in states]
    result = apply(fn, recurse)
    for state in changing:
        if any(p.dtype is not d for p, d in zip(state.pieces, state.dtypes, strict=True)):
            _make_again(state, fn)  # unless a unit inside already did
    for state, pieces in trusted:
        state.torch_unit.follow()
        for i in pieces - state.missing:
            state.trust(i)
    for state, i in bare if emptied else ():
        state.give_memory(i)
        state.trusted[i] = state.pieces[i]._version  # a later write then counts as initialisation
    for name, owner, key, _ in on_meta:
        buffer = owner[key]
        if not buffer.is_meta and buffer.numel():
            module._fsdpc_state.blank_buffers.append((name, owner, key, weakref.ref(buffer)))
    return result


def _buffers(module: torch.nn.Module) -> list[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Return (dotted name, dictionary, key, buffer) for each buffer inside a module."""
    return [
        (f"{path}.{key}".lstrip("."), m._buffers, key, buffer)
        for path, m in module.named_modules()
        for key, buffer in m._buffers.items()
        if buffer is not None
    ]


def _changes(state: UnitState, fn: Change) -> bool:
    """Return whether the dtype of any piece would change."""
    for dtype in set(state.dtypes):
        after = fn(torch.empty(0, dtype=dtype, device=_device.home()))
        if after.device != _device.home():
            raise NotImplementedError(
                f"unit '{state.unit.name}' would go to {after.device}: it lives where the engine "
                f"computes, on {_device.home()}; move the module before fully_shard(), or choose "
                "with fsdpc.set_default_device() before it where there is nothing to move"
            )
        core_dtype(after.dtype)
        if after.dtype is not dtype:
            return True
    return False


def _check(state: UnitState) -> None:
    name = state.unit.name
    if state.root is not None:
        raise RuntimeError(
            f"the dtype of unit '{name}' cannot change after its first forward: convert the model "
            "before, or give mp_policy a param_dtype"
        )
    for optimizer in state.optimizers:
        raise RuntimeError(
            f"the dtype of unit '{name}' cannot change under {type(optimizer).__name__}, which "
            "steps its memory: make the optimizer after"
        )


def _make_again(state: UnitState, fn: Change) -> None:
    old = state.unit
    missing = set(state.missing)
    unsharded = [
        torch.empty(shape, dtype=dtype, device=_device.home())
        if i in missing
        else full_value(state, i)
        for i, (shape, dtype) in enumerate(zip(state.shapes, state.dtypes, strict=True))
    ]
    unsharded = [fn(full) for full in unsharded]
    dtypes = [full.dtype for full in unsharded]
    unit = state.recipe.make(dtypes)
    unit.name = old.name
    unit.take_options(old)
    for i, full in enumerate(unsharded):
        if i not in missing:
            unit.write(i, _device.to_engine(full.contiguous()))
    with torch.no_grad():
        state.stand_on(unit, dtypes)
    for m in state.modules:
        m.__dict__["_fsdpc_unit"] = unit
