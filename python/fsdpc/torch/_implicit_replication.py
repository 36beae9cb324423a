"""Plain tensors that meet sharded ones inside torch's ``implicit_replication()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def cut(
    value: Any,
    like: dict[int, DTensor],
    part: Callable[[DTensor, torch.Tensor], DTensor],
    written: list[Any],
    at: int = 0,
) -> Any:
    """Replace each plain tensor that meets a DTensor by this rank's part of it.

    Parameters
    ----------
    value
        The arguments of an elementwise operation.
    like : dict
        A DTensor for each position in lists; 0 outside of lists.
    part : callable
        Cuts a plain tensor as a DTensor is cut.
    written : list
        What the operation writes.

    Raises
    ------
    RuntimeError
        A plain tensor is written, or its shape does not allow this.
    """
    if isinstance(value, dict):
        return {k: cut(v, like, part, written) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(cut(v, like, part, written) for v in value)
    if isinstance(value, list):
        kept = next((w for w in written if w is value), [])
        return [cut(v, like, part, kept, k) for k, v in enumerate(value)]
    of = like.get(at)
    if of is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if any(w is value for w in written):
        raise RuntimeError("a plain tensor would be written")
    if value.numel() == 1 and value.dim() <= of.dim():
        return value[(0,) * value.dim()]
    return part(of, value.detach().expand(of.shape))
