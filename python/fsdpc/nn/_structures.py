"""Search modules' arguments and results for tensors, for both frontends.

``csrc/bind/walk.c`` searches and rebuilds tuples, lists, dicts and dataclasses.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

from fsdpc._core import Tensor

#: Limit on objects to search, because one object may reference half the program.
MOST = 10_000


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return a container's or object's items, with their keys, indices or attribute names."""
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (type, ModuleType)):
        return ()
    return attributes(value).items()


def is_dataclass(value: Any) -> bool:
    """Return whether this is an instance of a dataclass."""
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, type)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    held = dict(getattr(value, "__dict__", ()))
    for name in _slots(type(value)):
        if hasattr(value, name):
            held[name] = getattr(value, name)
    return held


@cache
def _slots(kind: type) -> tuple[str, ...]:
    def of(cls: type) -> Iterator[str]:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield name

    return tuple(name for cls in kind.__mro__ for name in of(cls))


def contents(value: Any) -> Any:
    """Return a sequence's items as a list, or a mapping's or dataclass's values as a dict."""
    if isinstance(value, (tuple, list)):
        return list(value)
    return dict(value) if isinstance(value, dict) else attributes(value)


def copy_with(value: Any, contents: Any) -> Any:
    """Return a copy of a structure with different contents."""
    if isinstance(contents, list):
        return type(value)(*contents) if hasattr(value, "_fields") else type(value)(contents)
    copied = copy.copy(value)
    for key, item in contents.items():
        if isinstance(value, dict):
            copied[key] = item
        else:
            object.__setattr__(copied, key, item)
    return copied


def refuse_hidden(value: Any, unit: str) -> None:
    """Raise TypeError if an object returned by a native unit contains a tensor that requires grad.

    A unit's backward begins at the tensors in the tuples, lists, dicts and dataclasses that it
    returns. The engine calls this function for objects of all other types.
    """
    from fsdpc.nn import Module

    seen: set[int] = set()
    waiting = [(value, "")]
    while waiting and len(seen) < MOST:
        held, path = waiting.pop()
        if isinstance(held, Tensor) and held.requires_grad:
            raise TypeError(
                f"forward of unit '{unit}' returned a {type(value).__name__} that holds a tensor "
                f"which requires grad, at {path}: its backward would not begin there. Return "
                "tensors in tuples, lists, dicts and dataclasses"
            )
        if id(held) not in seen and not isinstance(held, (Tensor, Module)):
            seen.add(id(held))
            waiting += [(item, _path(held, path, key)) for key, item in children(held)]


def _path(held: Any, path: str, key: Any) -> str:
    plain = isinstance(held, (tuple, list, deque, set, frozenset, dict))
    return f"{path}[{key!r}]" if plain else f"{path}.{key}"
