"""Put sharded parameters into optimizers that were created before their model was sharded."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

#: Maps a parameter's ``id()`` to the dict that contains it and its key there.
Places = Mapping[int, tuple[dict[str, Any], str]]


def places_of(module: nn.Module) -> Places:
    """Map the ``id()`` of each parameter to its location, for :func:`moved` after sharding."""
    return {
        id(p): (owner._parameters, key)
        for owner in module.modules()
        for key, p in owner._parameters.items()
        if p is not None
    }


def moved(params: Iterable[Any], places: Places) -> list[Any]:
    """Return the parameters now in these locations; those without a location are unchanged."""
    found = [(p, places.get(id(p))) for p in params]
    return [p if at is None else at[0][at[1]] for p, at in found]


def give_params(optimizer: torch.optim.Optimizer, places: Places) -> None:
    """Replace the parameters in an optimizer's groups with sharded parameters."""
    for group in optimizer.param_groups:
        group["params"] = moved(group["params"], places)


def optimizers_over(places: Places) -> list[torch.optim.Optimizer]:
    """Return all optimizers in this process that contain any of these parameters.

    This visits all objects that Python's garbage collector tracks, which takes about 50 ms, once
    per model.
    """
    made = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    return [
        o for o in made
        if any(id(p) in places for g in getattr(o, "param_groups", ()) for p in g["params"])
    ]  # fmt: skip


def give_whole(optimizer: torch.optim.Optimizer, places: Places) -> None:
    """Like :func:`give_params`, but for parameters that are not cut; the states are kept."""
    states = optimizer.state
    held = [p for p in states if id(p) in places]
    for p, param in zip(held, moved(held, places), strict=True):
        states[param] = states.pop(p)
    give_params(optimizer, places)
