"""Find the tensors in modules' results.

``_core.rebuild`` passes objects other than tuples, lists, dicts and dataclasses through unchanged.
If a forward returns such objects (a distribution, a cache, a deque), they are searched too, because
a unit's backward begins at its outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdpc.nn._structures import MOST, children, is_dataclass

#: Objects that reference more than a forward returns.
_CLOSED = (nn.Module, torch.optim.Optimizer)


def returned(value: Any, since: int) -> list[torch.Tensor]:
    """Return the tensors in a forward's result.

    In objects, return only tensors that this forward created, because a cache also contains older
    ones.

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
