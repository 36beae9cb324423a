"""Plain tensors that meet sharded ones inside torch's ``implicit_replication()``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdpc.torch._operations import _tensors, _written, part_of, wrapped_as


def cut(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: dict[int, DTensor]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace each plain tensor that meets a DTensor of ``like`` by this rank's part of it.

    Returns
    -------
    tuple or None
        The arguments; None if a plain tensor is written, or its shape does not allow this.
    """

    def one(value: Any, at: int = 0) -> Any:
        if isinstance(value, list):
            return [one(v, k) for k, v in enumerate(value)]
        of = like.get(at)
        if of is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return value
        if value.numel() == 1 and value.dim() <= of.dim():
            return value[(0,) * value.dim()]
        return wrapped_as(of, part_of(of, value.detach().expand(of.shape)))

    try:
        made = tuple(map(one, args)), {k: one(v) for k, v in kwargs.items()}
    except RuntimeError:  # it cannot be expanded
        return None
    written = zip(_tensors(_written(func, args)), _tensors(_written(func, made[0])), strict=True)
    return None if any(a is not b for a, b in written) else made
