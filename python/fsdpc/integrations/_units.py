"""Divide a trainer's model into units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fsdpc.torch import FSDPModule, fully_shard
from fsdpc.torch._made_before import Places, give_params
from fsdpc.torch._plan import _options as options_of
from fsdpc.torch.plan import _by_classes, _plan_of, has_plan

#: None, classes or their names, a mapping with name patterns, or a function of (name, module).
Units = Iterable[type | str] | Mapping[Any, Any] | Callable[[str, nn.Module], Any] | None


def shard(module: nn.Module, units: Units, options: Mapping[str, Any]) -> None:
    """Turn a module and some of its submodules into units (collective).

    Parameters
    ----------
    module : nn.Module
        If part of it is already sharded, the user has chosen the units: only the remaining
        parameters become a unit.
    units : Units
        As for :func:`plan_of`.
    options : mapping
        Options of :func:`fsdpc.torch.fully_shard`.
    """
    if any(isinstance(m, FSDPModule) for m in module.modules()):
        if any(not hasattr(p, "fsdpc") for p in module.parameters()):
            fully_shard(module, **options)
        return
    plan = plan_of(units, module)
    if not callable(plan):
        styles = options.get("strategy") is None and options.get("reshard_after_forward") is None
        plan = {
            key: options_of(key, v) if styles or not isinstance(v, str) else {}
            for key, v in plan.items()
        }
    fully_shard(module, plan=plan, **options)
    if any(p.is_meta for p in module.parameters()):
        _materialise(module)


def plan_of(units: Units, module: nn.Module) -> Any:
    """Return the plan in a form that ``fully_shard`` accepts.

    Parameters
    ----------
    units : Units
        None means the ``fsdp_plan`` of any transformers models inside or, if there is none, every
        element of each outermost ``nn.ModuleList``.
    module : nn.Module

    Raises
    ------
    ValueError
        No module is an instance of one of these classes.
    """
    if units is None and has_plan(module):
        return _plan_of(module)
    if units is None:
        inside: dict[int, bool] = {}
        for m in module.modules():
            if isinstance(m, nn.ModuleList) and id(m) not in inside:
                inside.update((id(below), False) for child in m for below in child.modules())
                inside.update((id(child), any(True for _ in child.parameters())) for child in m)
        return lambda name, m: {} if inside.get(id(m)) else None
    if isinstance(units, Mapping) or (callable(units) and not isinstance(units, type)):
        return units
    return _by_classes(module, (units,) if isinstance(units, (type, str)) else tuple(units))


def _materialise(module: nn.Module) -> None:
    """Initialise parameters on the meta device if their modules have ``reset_parameters``."""
    from fsdpc.torch import _device

    module.to_empty(device=_device.home())
    for m in module.modules():
        if callable(getattr(m, "reset_parameters", None)):
            m.reset_parameters()  # type: ignore[operator]


def no_sync(module: nn.Module) -> ExitStack:
    """Return a context manager in which no inner unit reduces its gradients."""
    stack = ExitStack()
    for m in module.modules():
        if isinstance(m, FSDPModule):
            stack.enter_context(m.no_sync(recurse=False))
    return stack


def move(optimizer: torch.optim.Optimizer, places: Places) -> None:
    """Replace an optimizer's parameters, which it got before sharding, with the sharded parameters.

    Raises
    ------
    RuntimeError
        The optimizer already has states for whole parameters.
    """
    if optimizer.state:
        raise RuntimeError(
            f"{type(optimizer).__name__} has stepped before its model was sharded: make it after"
        )
    give_params(optimizer, places)
