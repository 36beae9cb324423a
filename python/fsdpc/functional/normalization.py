"""Normalisation of groups and of batches, over ranks too, composed of sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import wide


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise groups of channels to mean 0 and variance 1, then scale and shift channels.

    Parameters
    ----------
    x : Tensor
        (batch, channels, ...)
    groups : int
        Divides the channels.
    weight, bias : Tensor, optional
        (channels), of x's dtype.
    eps : float
        Added to the variance.

    Raises
    ------
    ValueError
        The groups do not divide the channels.

    Source: Wu & He 2018.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.group_norm(tensor([[1.0, 3.0]]), 1, eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise ValueError(f"group_norm: {groups} groups of x {x.shape}; they divide the channels")
    rows = _core.layer_norm(wide(x).reshape(x.shape[0], groups, -1), None, None, eps)
    return _scaled(rows.reshape(x.shape), weight, bias).to(x.dtype)


def batch_norm(
    x: Tensor,
    statistics: Sequence[Tensor] | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise channels over the batch to mean 0 and variance 1, then scale and shift.

    Parameters
    ----------
    x : Tensor
        (batch, channels, ...)
    statistics : two Tensors, optional
        Mean and variance (channels), such as :func:`batch_statistics` gives; the batch's own
        otherwise.
    weight, bias : Tensor, optional
        (channels)
    eps : float
        Added to the variance.

    Source: Ioffe & Szegedy 2015.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.batch_norm(tensor([[1.0], [3.0]]), eps=0.0).tolist()
    [[-1.0], [1.0]]
    """
    w = wide(x)
    mean, var = batch_statistics(w) if statistics is None else statistics
    scale = _core.rsqrt(wide(var) + eps)
    if weight is not None:  # of channels: two passes over x become one
        scale = scale * wide(weight)
    normal = (w - wide(mean).reshape(_along(x))) * scale.reshape(_along(x))
    return _scaled(normal, None, bias).to(x.dtype)


def batch_statistics(x: Tensor, over_ranks: bool = False) -> tuple[Tensor, Tensor]:
    """Compute mean and biased variance of each channel over batch and positions.

    Parameters
    ----------
    x : Tensor
        (batch, channels, ...), at least one element a channel.
    over_ranks : bool
        Over all ranks' batches, which may differ in size; collective, forward and backward.

    Returns
    -------
    mean, variance : Tensor
        (channels), float32 (float64 of float64), with gradients.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> mean, var = F.batch_statistics(tensor([[1.0], [3.0]]))
    >>> mean.tolist(), var.tolist()
    ([2.0], [1.0])
    """
    return counted_statistics(x, over_ranks)[:2]


def counted_statistics(x: Tensor, over_ranks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what :func:`batch_statistics` does, and of how many elements a channel (1)."""
    numel = math.prod(x.shape)
    if x.ndim < 2 or (numel == 0 and not over_ranks):
        raise ValueError(f"batch statistics of shape {x.shape}: give (batch, channels, ...)")
    w, dims = wide(x), [d for d in range(x.ndim) if d != 1]
    own = _core.full((1,), numel // max(1, x.shape[1]), dtype=w.dtype)
    total = _core.concat([w.sum(dims), own])  # one collective for both
    total = sum_over_ranks(total) if over_ranks else total
    count = total[-1:].detach()
    mean = total[:-1] / count
    away = w - mean.reshape(_along(x))
    squares = _core.sum_squares(away, dims)
    return mean, (sum_over_ranks(squares) if over_ranks else squares) / count, count


def sum_over_ranks(x: Tensor) -> Tensor:
    """Add a tensor up over all ranks; backward adds the gradients up. Collective, both ways.

    Alone, before :func:`fsdpc.init` or in a dry run, it is x.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.sum_over_ranks(tensor([1.0, 2.0])).tolist()  # a world of one
    [1.0, 2.0]
    """
    from fsdpc import distributed

    if not distributed.is_initialized() or distributed.world_size() == 1 or _core.in_dry_run():
        return x
    total = distributed.all_reduce(x)
    return _core.custom([x], [total], lambda dy: distributed.all_reduce(dy))[0]


def _along(x: Tensor) -> tuple[int, ...]:
    """The shape in which values of channels broadcast with x."""
    return (x.shape[1],) + (1,) * (x.ndim - 2)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * wide(weight).reshape(_along(x))
    return x if bias is None else x + wide(bias).reshape(_along(x))
