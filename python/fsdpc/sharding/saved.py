"""Saved tensors of units, which leave memory in forward and come back in backward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fsdpc import _core
from fsdpc.sharding.offload import OffloadPolicy, tier_of


class SavedTensors:
    """A rank's store on a disk, which the units of one policy share."""

    def __init__(self, core: _core.SavedTensors, fraction: float) -> None:
        self.core = core
        self.fraction = fraction

    def call(self, unit: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit's forward, and let what it saved leave when the next one begins."""
        core = _planned_store(self.fraction) if _core.in_dry_run() else self.core
        return core.call(unit, forward, args, kwargs)


_stores: weakref.WeakValueDictionary[tuple[str, int, float], SavedTensors] = (
    weakref.WeakValueDictionary()
)
_planned: dict[float, _core.SavedTensors] = {}  # of the running dry run, by fraction


def store_of(policy: Any, rank: int) -> SavedTensors | None:
    """Return the store of a policy that keeps activations on a disk; otherwise None."""
    if not leaves(policy):
        return None
    key = (os.path.realpath(policy.path), rank, float(policy.fraction))
    store = _stores.get(key)
    if store is None:
        core = _core.SavedTensors(tier_of(policy, rank), key[2])
        store = _stores[key] = SavedTensors(core, key[2])
    return store


def leaves(policy: Any) -> bool:
    """Return whether activations leave this process's memory; "host" is where CPUs compute."""
    return "activations" in getattr(policy, "on_disk", ())


def check_leaves(policy: Any, device: str) -> None:
    """Raise if activations cannot go where a policy puts them."""
    if policy is not None and getattr(policy, "activations", "device") != "device":
        if device != "cpu":
            raise NotImplementedError(
                f"activations={policy.activations!r} where ranks compute on {device}: they leave "
                "only CPU memory, for a disk"
            )


def refuse_outer(unit: str, module: Any) -> NoReturn:
    """Raise because only a unit without units inside has a policy that moves activations."""
    raise ValueError(
        f"activations of unit '{unit}' ({type(module).__name__}) on a disk: they leave when the "
        "forward of the next unit begins, so shard the blocks inside it as units with this "
        "offload_policy"
    )


# ---- plans ----


def _planned_store(fraction: float) -> _core.SavedTensors:
    if fraction not in _planned:
        _planned[fraction] = _core.SavedTensors(None, fraction)
    return _planned[fraction]


def take_planned() -> tuple[int, int]:
    """Return the bytes in memory and on the disk of the last dry run's stores, and forget them."""
    stores = list(_planned.values())
    _planned.clear()
    return sum(s.staging_bytes for s in stores), sum(s.file_bytes for s in stores)


@contextmanager
def planning(modules: dict[Any, OffloadPolicy]) -> Iterator[None]:
    """Let the saved tensors of modules that are not sharded leave, for a dry run."""
    own = {m: m.__dict__.get("forward") for m in modules}
    for m, policy in modules.items():
        m.__dict__["forward"] = _leaving(m.forward, float(policy.fraction))
    try:
        yield
    finally:
        for m, forward in own.items():
            if forward is None:
                del m.__dict__["forward"]
            else:
                m.__dict__["forward"] = forward


def _leaving(forward: Callable[..., Any], fraction: float) -> Callable[..., Any]:
    def leaving(*args: Any, **kwargs: Any) -> Any:
        return _planned_store(fraction).call("", forward, args, kwargs)

    return leaving
