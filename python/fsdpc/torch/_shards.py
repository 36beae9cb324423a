"""Check and convert the shards in an optimizer's state dict.

A pickled DTensor does not record which rank's rows it holds, so a rank could load another rank's
rows as its own. Sharded tensors therefore record their rows in an attribute, which ``torch.save``
preserves, and loading compares it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdpc.torch._dtensor import agree


def params_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters in its state dict's order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def keys_of(state_dict: dict[str, Any]) -> list[Any]:
    """Return the parameters' keys in an optimizer's state dict, in order.

    Keys are indices, or names if ``torch.distributed.checkpoint.state_dict`` created the dict.
    """
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def check(p: Any, key: str, value: Any) -> None:
    """Raise if a state is of another rank's rows.

    Raises
    ------
    ValueError
        The error names both row ranges.
    """
    info = getattr(p, "fsdpc", None)
    theirs = getattr(value, "fsdpc_rows", None)
    if info is None or theirs is None or not info.is_spread:
        return
    if theirs != info.extent:
        raise ValueError(
            f"'{key}' in the state dict is of {theirs}, and this rank has {info}: give each rank "
            "its own state_dict(), or load with set_optimizer_state_dict() or fsdpc.checkpoint"
        )


def check_all(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Check that a state dict contains this rank's rows; a hook for torch."""
    for key, p in zip(keys_of(state_dict), params_of(optimizer), strict=False):
        for name, value in state_dict["state"].get(key, {}).items():
            check(p, name, value)


def local(p: Any, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a state: of a DTensor, a whole tensor, or the rows themselves."""
    info = p.fsdpc
    state, i = info._state, info._index
    if isinstance(value, DTensor):
        check(p, "a state", value)
        if isinstance(p, DTensor) and agree(value._spec, p._spec):
            return value._local_tensor
        return state.own_rows(i, value.full_tensor())
    if value.shape == info.shape and value.shape != state.rows[i].shape:
        return state.own_rows(i, value)
    return value
