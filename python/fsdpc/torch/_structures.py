"""Find the tensors in modules' arguments and results.

Tuples, lists, dicts and dataclasses are searched at any depth, and rebuilt if a tensor in them
changes. Other objects pass through unchanged. If a forward returns them (a distribution, a cache,
a deque), they are searched too, because a unit's backward begins at its outputs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdpc.nn._structures import MOST, attributes, children, is_dataclass

#: Objects that reference more than a forward returns.
_CLOSED = (nn.Module, torch.optim.Optimizer)


def rebuild(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    around: dict[int, bool] | None = None,
) -> Any:
    """Return the structure with changed tensors, or the same object if no tensor changes.

    Parameters
    ----------
    value : object
    change : callable
        Maps a tensor to its replacement.
    around : dict, optional
        The enclosing structures, and whether each recurs inside itself.

    Raises
    ------
    TypeError
        A structure that contains itself would have to change.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    is_sequence, is_dict = isinstance(value, (tuple, list)), isinstance(value, dict)
    if not (is_sequence or is_dict or is_dataclass(value)):
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
        ]  # no call for tensors: it would cost time per unit and step
        same = all(map(operator.is_, items, value))
    else:
        held = value if is_dict else attributes(value)
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
    """Return a structure like ``value`` with new items."""
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
    """Return the tensors in a structure."""
    found: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    rebuild(value, note)
    return found


def returned(value: Any, since: int) -> list[torch.Tensor]:
    """Return the tensors in a forward's result.

    In objects, only those that this forward created: a cache also contains older ones.

    Parameters
    ----------
    value : object
    since : int
        Sequence number of autograd's next node before the forward.
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
    if id(value) in seen or len(seen) == MOST or isinstance(value, _CLOSED):
        return
    seen.add(id(value))
    opened = isinstance(value, (tuple, list, dict)) or is_dataclass(value)
    for _, item in children(value):
        _collect(item, since, hidden or not opened, found, seen)
