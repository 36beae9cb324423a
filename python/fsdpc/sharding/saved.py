"""Saved tensors of units, which leave memory in forward and come back in backward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from fsdpc import _core
from fsdpc.sharding.offload import OffloadPolicy, tier_of
from fsdpc.tensors.device import get_default_device


class SavedTensors:
    """A rank's store on a disk or a GPU's host, which the units of one policy share."""

    def __init__(self, place: _core.Tier | str, fraction: float) -> None:
        self.core = _core.SavedTensors(place, fraction)
        self.planned = isinstance(place, str), fraction

    def call(self, unit: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit's forward, and let what it saved leave when the next one begins."""
        core = _planned_store(*self.planned) if _core.in_dry_run() else self.core
        return core.call(unit, forward, args, kwargs)


_stores: weakref.WeakValueDictionary[tuple[str, int, float], SavedTensors] = (
    weakref.WeakValueDictionary()
)
#: Those of the running dry run, by whether they are on a host, and fraction.
_planned: dict[tuple[bool, float], _core.SavedTensors] = {}


def store_of(policy: Any, rank: int) -> SavedTensors | None:
    """Return the store of a policy whose activations leave; otherwise None."""
    if not leaves(policy):
        return None
    on_host = policy.activations == "host"
    key = "" if on_host else os.path.realpath(policy.path), rank, float(policy.fraction)
    store = _stores.get(key)
    if store is None:
        place = "host" if on_host else tier_of(policy, rank)
        store = _stores[key] = SavedTensors(place, key[2])
    return store


def leaves(policy: Any) -> bool:
    """Return whether activations leave the memory of this process's device."""
    place = getattr(policy, "activations", "device")
    return place == "disk" or (place == "host" and get_default_device() != "cpu")


def check_leaves(policy: Any, device: str) -> None:
    """Raise if a policy puts activations on a disk and ranks do not compute on CPUs."""
    if device != "cpu" and getattr(policy, "activations", "device") == "disk":
        raise NotImplementedError(
            f"activations='disk' where ranks compute on {device}: they can be on the 'host'"
        )


def refuse_outer(unit: str, module: Any) -> NoReturn:
    """Raise because only a unit without units inside has a policy that moves activations."""
    raise ValueError(
        f"activations of unit '{unit}' ({type(module).__name__}) cannot leave: they do when the "
        "forward of the next unit begins, so shard the blocks inside it as units with this "
        "offload_policy"
    )


# ---- plans ----


def _planned_store(on_host: bool, fraction: float) -> _core.SavedTensors:
    key = on_host, fraction
    if key not in _planned:
        _planned[key] = _core.SavedTensors(None, fraction)
    return _planned[key]


def take_planned() -> dict[str, int]:
    """Return the bytes of the last dry run's stores by category of a plan, and forget them."""
    stores = list(_planned.items())
    _planned.clear()
    on_disk = [store for (on_host, _), store in stores if not on_host]
    return {
        "staging": sum(store.staging_bytes for store in on_disk),
        "file": sum(store.away_bytes for store in on_disk),
        "pinned": sum(store.away_bytes for (on_host, _), store in stores if on_host),
    }


@contextmanager
def planning(modules: dict[Any, OffloadPolicy]) -> Iterator[None]:
    """Let the saved tensors of modules that are not sharded leave, for a dry run."""
    own = {m: m.__dict__.get("forward") for m in modules}
    for m, policy in modules.items():
        place = policy.activations == "host", float(policy.fraction)
        m.__dict__["forward"] = partial(_call_planned, place, m.forward)
    try:
        yield
    finally:
        for m, forward in own.items():
            if forward is None:
                del m.__dict__["forward"]
            else:
                m.__dict__["forward"] = forward


def _call_planned(
    place: tuple[bool, float], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return _planned_store(*place).call("", forward, args, kwargs)
