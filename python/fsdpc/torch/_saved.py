"""Saved tensors of torch modules that leave memory until backward.

The root's forward runs inside ``saved_tensors_hooks``, so what autograd saves passes through here:
inputs of checkpointed blocks too, since both kinds of checkpoint save these as operations do. A
*set* is what was saved from the end of one unit's forward to the end of the next one's. It leaves
when the forward of the unit after that begins; csrc/tier/saved.h has the schedule.

A storage leaves only if the saved tensors are its only users. Parameters, the user's inputs and
tensors that were changed in place therefore stay.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fsdpc import _core
from fsdpc.sharding.saved import SavedTensors, refuse_outer

_users = torch._C._storage_Use_Count
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class _Saved:
    """A tensor as autograd holds it: a view of its memory, or where that view was.

    ``entry`` is None if the tensor stays.
    """

    __slots__ = ("__weakref__", "dtype", "entry", "geometry", "version", "view")

    def __init__(self, view: torch.Tensor, entry: _Entry | None) -> None:
        self.view: torch.Tensor | None = view
        self.entry = entry
        self.dtype = view.dtype
        if entry is not None:
            self.geometry = view.storage_offset(), view.shape, view.stride()
            entry.saved.append(weakref.ref(self))
        self.version = view._version

    def restored(self) -> torch.Tensor:
        entry = self.entry
        if entry is not None and entry.set is not None:
            entry.set.need()
        if self.view is None:
            assert entry is not None and entry.storage is not None
            empty = torch.empty(0, dtype=self.dtype)
            self.view = empty.set_(entry.storage, *self.geometry)  # type: ignore[call-overload]
            self.version = self.view._version
        elif self.view._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {list(self.view.shape)} is at version {self.view._version}; "
                f"expected version {self.version} instead"
            )
        return self.view


class _Entry:
    """A storage of saved tensors; None while it is away."""

    __slots__ = ("__weakref__", "saved", "set", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.saved: list[weakref.ref[_Saved]] = []
        self.set: _core.SavedSet | None = None

    def views(self) -> list[_Saved]:
        found = [ref() for ref in self.saved]
        return [s for s in found if s is not None and s.view is not None]

    def may_leave(self) -> bool:
        views = self.views()
        unchanged = all(s.view._version == s.version for s in views)  # type: ignore[union-attr]
        return unchanged and _users(self.storage._cdata) == len(views) + 1  # type: ignore[union-attr]


class _Set:
    """What was saved between two units; the owner of the core's set."""

    def __init__(self) -> None:
        self.entries: dict[int, weakref.ref[_Entry]] = {}  # by address
        self.moving: list[tuple[weakref.ref[_Entry], torch.UntypedStorage]] = []
        self.sizes: list[int] = []

    def entry_of(self, t: torch.Tensor) -> _Entry:
        storage = t.untyped_storage()
        ref = self.entries.get(storage.data_ptr())
        entry = ref() if ref is not None else None
        if entry is None:
            entry = _Entry(storage)
            self.entries[storage.data_ptr()] = weakref.ref(entry)
        return entry

    # The rest is called by the core.

    def arrays(self) -> list[tuple[int, int]]:
        alive = [(ref, ref()) for ref in self.entries.values()]
        self.moving = [
            (ref, entry.storage)
            for ref, entry in alive
            if entry is not None and entry.storage is not None and entry.may_leave()
        ]
        return [(storage.data_ptr(), storage.nbytes()) for _, storage in self.moving]

    def leave(self, chosen: list[bool]) -> None:
        self.moving = [m for m, leaves in zip(self.moving, chosen, strict=True) if leaves]
        self.sizes = [storage.nbytes() for _, storage in self.moving]

    def release(self) -> None:
        for ref, _ in self.moving:
            entry = ref()
            if entry is None:
                continue
            for saved in entry.views():
                saved.view = None
            entry.storage = None
        left = [ref for ref, _ in self.moving]
        self.moving.clear()
        self.entries = dict(enumerate(left))

    def restore(self) -> list[int]:
        self.moving = [
            (ref, torch.empty(n, dtype=torch.uint8).untyped_storage())
            for ref, n in zip(self.entries.values(), self.sizes, strict=True)
        ]
        return [storage.data_ptr() for _, storage in self.moving]

    def settle(self, restored: bool) -> None:
        for ref, storage in self.moving if restored else ():
            entry = ref()
            if entry is not None:
                entry.storage = storage
        self.moving.clear()
        self.entries.clear()


class Saving:
    """The saved tensors of one root, some of whose units let them leave."""

    def __init__(self, store: SavedTensors, units: set[Any]) -> None:
        self.store = store
        self.units = units
        self.current: _Set | None = None  # while the root's forward runs
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.restored)

    def _pack(self, t: torch.Tensor) -> _Saved:
        plain = type(t) is torch.Tensor and t.layout is torch.strided and t.device.type == "cpu"
        may_leave = self.current is not None and plain and not t.is_conj() and not t.is_neg()
        if not may_leave:
            return _Saved(t, None)
        return _Saved(t.detach(), self.current.entry_of(t))  # type: ignore[union-attr]

    def enter(self, name: str) -> None:
        """Begin the root's forward."""
        top = _top_hooks(True)
        if top is not None and not isinstance(getattr(top[0], "__self__", None), Saving):
            raise RuntimeError(
                f"activations of unit '{name}' on a disk, and its forward runs inside other hooks "
                "for saved tensors, such as a checkpoint's or offload_wrapper's: put these inside "
                "the outermost fully_shard, or leave activations out of the policy"
            )
        self.hooks.__enter__()
        self.current = _Set()

    def leave(self) -> None:
        """End the root's forward; what was saved after the last unit stays."""
        self.hooks.__exit__()
        self.current = None

    def begin_unit(self, state: Any) -> None:
        if self.current is not None and state in self.units:
            self.store.core.begin()

    def end_unit(self, state: Any) -> None:
        if self.current is None or state not in self.units:
            return
        of_core = self.store.core.end(state.unit.name, self.current)
        for ref in self.current.entries.values():
            entry = ref()
            if entry is not None:
                entry.set = of_core
        self.current = _Set()


def saving_of(states: list[Any]) -> Saving | None:
    """Return the store for the units that let activations leave: those that enclose no other."""
    own = [s for s in states if s.store is not None]
    moving = {id(m) for s in own for m in s.modules}
    inner = [
        s
        for s in own
        if s is not states[0]
        and not any(id(d) in moving for m in s.modules for d in list(m.modules())[1:])
    ]
    if not own:
        return None
    if not inner:
        refuse_outer(own[0].unit.name, own[0].modules[0])
    stores = {s.store for s in inner}
    if len(stores) > 1:
        raise ValueError(
            f"activations of units '{inner[0].unit.name}' and others go to different folders or in "
            "different fractions: give all units of a model one offload_policy"
        )
    return Saving(stores.pop(), set(inner))  # type: ignore[arg-type]
