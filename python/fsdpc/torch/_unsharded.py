"""Create a unit's unsharded parameters, once its root has created the parameter buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc import _core
from fsdpc.torch import _device
from fsdpc.torch._gather_hooks import Gather
from fsdpc.torch._param_layout import local_of
from fsdpc.torch._subclasses import Refresh
from fsdpc.torch.kernels import target

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

set_version: Callable[[tuple[Any, ...], tuple[int, ...]], None]
set_version = torch._C._autograd._unsafe_set_version_counter
try:
    set_version((torch.empty(0),), (0,))
except TypeError:  # torch 2.6 and older accept one tensor

    def set_version(bases: tuple[Any, ...], versions: tuple[int, ...]) -> None:
        for base, version in zip(bases, versions, strict=True):
            torch._C._autograd._unsafe_set_version_counter(base, version)


def bind(state: UnitState) -> None:
    """Create the unsharded parameters over the parameter buffer, and give them to the TorchUnit.

    Collective if a subclass has gather hooks.
    """
    with torch.inference_mode(False), torch.no_grad():
        flats = _core.unit_memory(state.unit, "unsharded")
        lends = state.torch_unit.lends_unsharded
        bases = tuple((_device.like if lends else _device.to_torch)(m) for m in flats)
        lent = [_device.Lent(base) for base in bases] if lends else None
        refreshes = [_add(state, i, bases) for i in range(len(state.params))]
        for one in lent or ():
            one.give()
    # DTensors, subclasses and copies count their own versions.
    each = zip(state.unsharded, state.layouts, refreshes, strict=True)
    counting = tuple(p for p, layout, r in each if isinstance(p, DTensor) or layout.kind or r)
    stored = [
        layout.kind.take if layout.kind else None if layout.is_plain else layout.take
        for layout in state.layouts
    ]
    root: Any = state.root
    state.refreshes = [r for r in refreshes if r is not None]
    versions = partial(_refresh, state.refreshes) if state.refreshes else set_version
    state.torch_unit.bind(
        state.unsharded, bases + counting, lent, versions, root.at_end, root.torch_units, stored
    )


def _add(state: UnitState, i: int, bases: Sequence[torch.Tensor]) -> Refresh | None:
    """Create an unsharded parameter, and return what to call before modules see it."""
    layout = state.layouts[i]
    group, offset, *_ = state.places[i]
    values = bases[group][offset : offset + layout.stored.numel()].view(layout.stored)
    local = local_of(state.params[i])
    if layout.kind is not None:
        full, refresh = layout.kind.bind(state, i, values)
    elif hasattr(local, "fsdp_pre_all_gather"):  # set on a plain tensor
        gather = Gather(state, i, local)
        full, refresh = gather.unsharded, gather.refresh
    else:
        full, refresh = nn.Parameter(layout.place(values), requires_grad=False), None
        full.__dict__.update(state.attributes[i])
        target(full, state, i)
    state.unsharded.append(full)
    return refresh


def _refresh(refreshes: Sequence[Refresh], bases: Any, versions: tuple[int, ...]) -> None:
    """Refresh the unsharded parameters that are not only views of the bases; then set versions."""
    for refresh in refreshes:
        refresh(versions[0])
    set_version(bases, versions)
