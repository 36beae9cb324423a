"""Apply ``.to()``, ``.double()`` and other ``nn.Module._apply`` calls to sharded parameters.

A new dtype changes the layout, so the unit is rebuilt from its parameters, which are gathered and
converted. This is possible only before the first forward, when the units get a common parameter
buffer, and only if no optimizer uses the unit's memory. All other changes are written to the
parameters' rows.
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
    changing = [s for s in states if _changes(s, fn)]
    for state in changing:
        _check(state)
    for state in states:
        state.torch_unit.follow()
    missing = any(s.missing for s in states)
    emptied = missing and not fn(torch.empty(0, device="meta")).is_meta
    on_meta = [each for each in _buffers(module) if each[3].is_meta]
    slots = [(owner, key, owner[key]) for s in states for owner, key, _ in s.slots]
    try:
        for owner, key, _ in slots:
            owner[key] = None
        result = apply(fn, recurse)
    finally:
        for owner, key, value in slots:
            owner[key] = value
    for state in states:
        if state in changing:
            _make_again(state, fn)
        else:
            _change_rows(state, fn, emptied)
    for name, owner, key, _ in on_meta:
        buffer = owner[key]
        if not buffer.is_meta and buffer.numel():
            module._fsdpc_state.blank_buffers.append((name, owner, key, weakref.ref(buffer)))
    return result


def _change_rows(state: UnitState, fn: Change, emptied: bool) -> None:
    """Write a conversion's values into the rows; ``emptied``: it gave meta tensors memory."""
    written = state.written()
    for i, rows in enumerate(state.rows):
        if i in state.missing:
            if emptied:
                state.give_memory(i)
                state.trusted[i] = state.version(i)  # a later write then counts as initialisation
            continue
        with torch.no_grad():
            changed = fn(rows.detach())
            if changed.data_ptr() != rows.data_ptr():
                rows.copy_(changed)
        if i not in written:
            state.trust(i)


def _buffers(module: torch.nn.Module) -> list[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Return (dotted name, dictionary, key, buffer) for each buffer inside a module."""
    return [
        (f"{path}.{key}".lstrip("."), m._buffers, key, buffer)
        for path, m in module.named_modules()
        for key, buffer in m._buffers.items()
        if buffer is not None
    ]


def _changes(state: UnitState, fn: Change) -> bool:
    """Return whether the dtype of any parameter would change."""
    for dtype in set(state.dtypes) - {torch.uint8}:  # bytes stay bytes
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
            stored = state.layouts[i].store(full)
            unit.write(i, _device.to_engine(stored.contiguous()))
    with torch.no_grad():
        state.stand_on(unit, dtypes)
    for m in state.modules:
        m.__dict__["_fsdpc_unit"] = unit
