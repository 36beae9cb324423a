"""Tensors in what modules take and return.

Tuples, lists, dicts and dataclasses are opened at any depth and built anew where a tensor in them
changes. Other objects pass through as they are. Those that a forward returns (a distribution, a
cache, a deque) are looked into as well, because the backward of a unit begins at its outputs.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

#: Objects that lead to more than their forward returns.
_CLOSED = (type, ModuleType, nn.Module, torch.optim.Optimizer)
#: How many objects of an output are looked into: one may lead to half the program.
_MOST = 10_000


def rebuild(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    around: dict[int, bool] | None = None,
) -> Any:
    """Return the structure with its tensors changed; the same objects where nothing changes.

    Parameters
    ----------
    value : object
    change : callable
        Of a tensor.
    around : dict, optional
        The structures that hold this one, and whether they were met again inside.

    Raises
    ------
    TypeError
        A structure that holds itself would change.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    is_sequence, is_dict = isinstance(value, (tuple, list)), isinstance(value, dict)
    if not (is_sequence or is_dict or _is_dataclass(value)):
        return value
    around = {} if around is None else around
    if id(value) in around:
        around[id(value)] = True
        return value
    around[id(value)] = False
    if is_sequence:
        items: Any = [
            change(item) if isinstance(item, torch.Tensor) else rebuild(item, change, around)
            for item in value
        ]  # tensors at once, as a call a unit and step is what sharding costs
        same = all(map(operator.is_, items, value))
    else:
        held = value if is_dict else _attributes(value)
        items = {key: rebuild(item, change, around) for key, item in held.items()}
        same = all(items[key] is item for key, item in held.items())
    cyclic = around.pop(id(value))
    if same:
        return value
    if cyclic:
        raise TypeError(
            f"a {type(value).__name__} that holds itself, with tensors that the unit around this "
            "forward casts or marks: pass these apart from it"
        )
    return _made(value, items)


def _made(value: Any, items: Any) -> Any:
    """Return a structure like ``value`` of other items."""
    if isinstance(items, list):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return items
    copied = copy.copy(value)
    for key, item in items.items():
        if isinstance(value, dict):
            copied[key] = item
        else:
            object.__setattr__(copied, key, item)
    return copied


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a structure."""
    found: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    rebuild(value, note)
    return found


def returned(value: Any, since: int) -> list[torch.Tensor]:
    """Return the tensors of what a forward returns.

    Of those in objects only the ones that it made: a cache holds those of other forwards too.

    Parameters
    ----------
    value : object
    since : int
        The number that autograd's next node had before the forward.
    """
    found: list[torch.Tensor] = []
    _collect(value, since, False, found, set())
    return found


def _collect(
    value: Any, since: int, hidden: bool, found: list[torch.Tensor], seen: set[int]
) -> None:
    if isinstance(value, torch.Tensor):
        made = not hidden or (value.grad_fn is not None and value.grad_fn._sequence_nr() >= since)
        if made:
            found.append(value)
        return
    if id(value) in seen or len(seen) == _MOST or isinstance(value, _CLOSED):
        return
    seen.add(id(value))
    if isinstance(value, (tuple, list)):
        inside: Any = value
    elif isinstance(value, (deque, set, frozenset)):
        inside, hidden = value, True
    elif isinstance(value, dict):
        inside = value.values()
    else:
        inside = _attributes(value).values()
        hidden = hidden or not _is_dataclass(value)
    for item in inside:
        _collect(item, since, hidden, found, seen)


def _is_dataclass(value: Any) -> bool:
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, type)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
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
