"""What cannot be sharded or stepped, said before anything is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdpc.torch import _forward
from fsdpc.torch.policies import core_dtype


def check_module(module: Any, sharded: type) -> None:
    """Raise if a module cannot be a unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard takes a torch.nn.Module or a list of them, got {type(module).__name__}; "
            "for fsdpc.nn modules use fsdpc.fully_shard"
        )
    name = type(module).__name__
    if isinstance(module, sharded):
        raise ValueError(f"{name} is sharded already: fully_shard was called twice")
    own = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    if not own or isinstance(
        module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    ):
        raise ValueError(
            f"{name} has no forward of its own, so nothing would gather its parameters: shard the "
            "modules in it (a list of them is one unit), or the module around it"
        )
    for inner in module.modules():
        if isinstance(inner, nn.Embedding) and (inner.max_norm is not None or inner.sparse):
            what = "max_norm writes weights in forward" if inner.max_norm else "sparse gradients"
            raise NotImplementedError(
                f"{name} holds an nn.Embedding whose {what}: make it without, or ignore its weight"
            )


_RUNNING = (_forward.run.__code__, nn.Module._call_impl.__code__)


def check_place(modules: list[nn.Module]) -> None:
    """Raise inside backward, or inside the forward of one of the modules or around them."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError("fully_shard inside backward: shard before training")
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in _RUNNING:
            running = frame.f_locals.get("module", frame.f_locals.get("self"))
            inside = set(running.modules()) if isinstance(running, nn.Module) else set()
            for m in modules:
                if m in inside:
                    raise RuntimeError(
                        f"fully_shard({type(m).__name__}) inside the forward of "
                        f"{type(running).__name__}: shard before the first forward"
                    )
        frame = frame.f_back  # type: ignore[assignment]


def check_parameter(
    name: str, p: nn.Parameter, placement: Callable[[nn.Parameter], Any] | None
) -> None:
    """Raise if a parameter cannot be sharded."""
    holder = getattr(p, "_fsdpc_sharded", None) or getattr(p, "fsdpc", None)
    if holder is not None:
        raise ValueError(
            f"parameter '{name}' is sharded already, as {holder}: modules that share (tie) a "
            "parameter belong into one unit; shard a module around them all, or give "
            "fully_shard a list of them"
        )
    core_dtype(p.dtype)
    if p.dim() == 0:
        raise ValueError(
            f"parameter '{name}' is a scalar, which cannot be sharded: give it shape (1,)"
        )
    if not p.is_contiguous():
        raise ValueError(
            f"parameter '{name}' {tuple(p.shape)} is not contiguous (strides {p.stride()}): make "
            "it so before fully_shard()"
        )
    if p.device.type not in ("cpu", "meta"):
        raise NotImplementedError(
            f"parameter '{name}' is on {p.device}: only the CPU is supported; "
            "model.to('cpu') before fully_shard()"
        )
    asked = placement(p) if placement else None
    if asked is not None and getattr(asked, "dim", None) != 0:
        raise NotImplementedError(
            f"shard_placement_fn asks for {asked} of '{name}': parameters are cut along "
            "dimension 0, into whole rows"
        )


#: Optimizers whose update of an element reads others of its parameter: by rows, columns, products.
STRUCTURED = frozenset({"Adafactor", "LBFGS", "Muon", "SOAP", "Shampoo"})


def check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step that would be lost, or other than that of the whole parameter."""
    if getattr(optimizer, "_fsdpc_checked", 0) == len(optimizer.param_groups):
        return
    structured = next((c for c in type(optimizer).__mro__ if c.__name__ in STRUCTURED), None)
    for group in optimizer.param_groups:
        for p in group["params"]:
            where = getattr(p, "_fsdpc_sharded", None)
            if where is not None:
                raise RuntimeError(
                    f"this optimizer was made before fully_shard: it holds the old parameter "
                    f"{where}, which nothing reads any more; make it after"
                )
            info = getattr(p, "fsdpc", None)
            if structured is not None and getattr(info, "is_cut", False):
                raise NotImplementedError(
                    f"{structured.__name__} reads whole parameters, and this rank has {info} "
                    "alone: name them in fully_shard(whole_params=...), or use an optimizer that "
                    "steps each element by itself (AdamW, SGD, Lion)"
                )
    optimizer._fsdpc_checked = len(optimizer.param_groups)  # type: ignore[attr-defined]


register_optimizer_step_pre_hook(check_optimizer)
