"""``shard_by_plan``: shard a whole model by its own plan, or by its layer classes.

Transformers models have a plan: ``fsdp_plan`` maps name patterns to whether the parameters are
freed after forward. Configurations inherit a plan whose names do not exist in many models, so a
plan is used only if it matches the model's layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn

from fsdpc.sharding.fsdp_module import register_fsdp_forward_method
from fsdpc.torch import _device
from fsdpc.torch._module import fully_shard
from fsdpc.torch._plan import STYLES, fits


def shard_by_plan(
    model: nn.Module, *, classes: Iterable[type | str] | None = None, **options: Any
) -> Any:
    """Shard a model by its ``fsdp_plan``, inner units first and the model last; collective.

    Parameters
    ----------
    model : nn.Module
        A transformers model, or a module that contains such models (PEFT).
    classes : iterable of type or str, optional
        Ignore the plan and make each module with one of these classes or class names a unit. An
        empty list makes the whole model one unit.
    **options
        Options of :func:`fsdpc.torch.fully_shard` for all units. ``reshard_after_forward`` and
        ``strategy`` override the plan.

    Returns
    -------
    the same model

    Raises
    ------
    ValueError
        No classes were given and the model has no plan that matches its layers; or no module
        has one of the classes.

    Notes
    -----
    ``"free_full_weight"`` means ``reshard_after_forward=True``, ``"keep_full_weight"`` False. The
    last norm and the head form one unit if both are kept; so do modules that share a parameter.
    All ranks must enter and leave ``model.generate()`` together. On CPUs, ranks may run different
    numbers of steps (inside ``hold()``); on GPUs, they run the same number (``synced_gpus``).

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> _ = shard_by_plan(model, classes=["Linear"])
    >>> [type(m).__name__ for m in (model, *model)]
    ['FSDPSequential', 'FSDPLinear', 'ReLU', 'FSDPLinear']
    """
    styles = options.get("strategy") is None and options.get("reshard_after_forward") is None
    plan = _plan_of(model) if classes is None else _by_classes(model, tuple(classes))
    fully_shard(model, plan={k: v if styles else {} for k, v in plan.items()}, **options)
    if callable(getattr(model, "generate", None)):
        _gather_in_generate(model)
    return model


def _gather_in_generate(model: Any) -> None:
    """Make ``generate()`` gather parameters; if possible, ranks may differ in step counts."""
    if not _device.on_cpu():
        return register_fsdp_forward_method(model, "generate")
    method = model.generate

    @wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        summoned = model._fsdpc_state.summoned  # each rank has its own copies and may run by itself
        with torch.no_grad(), nullcontext() if summoned else model.hold():
            return model._fsdpc_run(method, args, kwargs)

    model.__dict__["generate"] = generate


def layer_classes(model: nn.Module) -> list[str]:
    """Return the names of the classes that transformers never splits across devices."""
    found: set[str] = set()
    for m in model.modules():
        found.update(getattr(m, "_no_split_modules", None) or ())
    inside = {type(m).__name__ for m in model.modules()}
    return sorted(found & inside)


def has_plan(model: nn.Module) -> bool:
    """Return whether a model has a plan that matches its layers."""
    return any(_finds_layers(model, plan) for plan in _plans(model))


def _plans(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the plans of the outermost transformers models, with names relative to ``model``."""
    found = []
    todo = [("", model)]
    while todo:
        path, m = todo.pop()
        if hasattr(type(m), "fsdp_plan"):
            plan = {path + key: value for key, value in (m.fsdp_plan or {}).items()}
            found.append(_last_norm_and_head(path, m, plan))
        else:
            todo += [(f"{path}{name}.", child) for name, child in m.named_children()]
    return found


def _last_norm_and_head(path: str, model: Any, plan: dict[Any, Any]) -> dict[Any, Any]:
    """Return the plan, with the last norm and the head as one unit if it keeps both gathered."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept = [key for key, value in plan.items() if value == "keep_full_weight"]
    named = {path + name: m for name, m in model.named_modules()}
    pair = [key for key in kept if key.endswith("norm") and key in named]
    pair += [key for key in kept if head is not None and named.get(key) is head]
    if len(pair) != 2:
        return plan
    return {k: v for k, v in plan.items() if k not in pair} | {tuple(pair): "keep_full_weight"}


def _finds_layers(model: nn.Module, plan: dict[Any, Any]) -> bool:
    """Return whether a starred pattern, or any pattern if none has a star, matches a module."""
    patterns = [p for key in plan for p in (key if isinstance(key, tuple) else (key,))]
    layers = [p for p in patterns if "*" in p] or patterns
    return any(fits(name, p) for name, _ in model.named_modules() for p in layers)


def _plan_of(model: nn.Module) -> dict[Any, Any]:
    plans = [plan for plan in _plans(model) if _finds_layers(model, plan)]
    if not plans:
        hint = layer_classes(model) or ["the class of its layers"]
        raise ValueError(
            f"{type(model).__name__} brings no fsdp_plan that finds its layers: give "
            f"shard_by_plan(model, classes={hint}), or model.fsdp_plan a mapping of patterns of "
            f"names to one of {sorted(STYLES)}"
        )
    return {key: value for plan in plans for key, value in plan.items()}


def _by_classes(model: nn.Module, classes: tuple[type | str, ...]) -> dict[Any, Any]:
    """Return a plan that lists the name of every module of these classes."""
    plan: dict[Any, Any] = {}
    for cls in classes:
        inside = [
            name
            for name, m in model.named_modules()
            if name and any(c is cls or c.__name__ == cls for c in type(m).__mro__)
        ]
        if not inside:
            kinds = sorted({type(m).__name__ for m in model.modules()})
            raise ValueError(f"no module of {type(model).__name__} is a {cls!r}: it has {kinds}")
        plan.update(dict.fromkeys(inside, {}))
    return plan
