"""Recompute the buffers that ``to_empty()`` left empty, or raise an error that names them.

State dicts do not contain non-persistent buffers, such as rotary tables. Without this module, users
of meta-device models would have to fill in these buffers themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

Blank = dict[int, set[str]]  # a module's dictionary of buffers -> keys without values


def _blank(state: UnitState) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (name, owner, key)
        for name, owner, key, made in state.blank_buffers
        if made() is not None and owner.get(key) is made() and made()._version == 0
    ]


def fill_blank(top: nn.Module, state: UnitState) -> None:
    """Make modules inside ``top`` compute a unit's empty buffers; raise if any remain empty.

    A module without parameters fills them in ``reset_parameters()`` or ``rope_init()``. For other
    modules, the enclosing model's ``_init_weights()`` fills them, as transformers does.
    """
    found: Blank = {}
    for _, owner, key in _blank(state):
        found.setdefault(id(owner), set()).add(key)
    if found:
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for m in top.modules():
                if id(m._buffers) in found and all(p is None for p in m._parameters.values()):
                    _compute(top, m, found[id(m._buffers)])
    left = [name for name, _, _ in _blank(state)]
    if left:
        raise RuntimeError(
            f"buffers {left} of unit '{state.unit.name}' were on the meta device and have no "
            "values yet (no state dict holds non-persistent ones): copy_() into them, assign "
            "others, or call model.init_weights() inside summon_full_params() if it has that"
        )
    state.blank_buffers.clear()


def _compute(top: nn.Module, module: nn.Module, blank: set[str]) -> None:
    loaded = {k: b.clone() for k, b in module._buffers.items() if b is not None and k not in blank}
    for name in ("reset_parameters", "rope_init"):
        method = getattr(type(module), name, None)
        if callable(method):
            method(module)
            break
    else:
        for outer in top.modules():
            if hasattr(outer, "_init_weights") and any(m is module for m in outer.modules()):
                outer._init_weights(module)
                break
    for key, value in loaded.items():
        module._buffers[key].copy_(value)  # type: ignore[union-attr]
