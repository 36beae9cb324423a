"""Group and batch normalisation, optionally across ranks.

Each pass over x is a kernel that computes moments, an affine map or sums of gradients, with one row
per channel and batch element. Intermediate results are small tensors, which other operations
combine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import wide
from fsdpc.tensors.grad_mode import no_grad


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
        Must divide the number of channels.
    weight, bias : Tensor, optional
        (channels), in x's dtype.
    eps : float
        Added to the variance.

    Raises
    ------
    ValueError
        ``groups`` does not divide the number of channels.

    Source: Wu & He 2018.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.group_norm(tensor([[1.0, 3.0]]), 1, eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups:
        raise ValueError(f"group_norm: {groups} groups of x {x.shape}; they divide the channels")
    shape = (x.shape[0], groups, x.shape[1] // groups)
    if not _is_single(x):
        return _normalized(x, _Sets(shape, 2), weight, bias, eps)[0]
    w, b = (None if t is None else wide(t) for t in (weight, bias))
    y = _core.layer_norm(wide(x).reshape(shape), None, None, eps).reshape(*x.shape[:2])
    y = y if w is None else y * w
    return (y if b is None else y + b).reshape(x.shape).to(x.dtype)


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
        Mean and variance (channels), such as the result of :func:`batch_statistics`; the batch's
        own by default.
    weight, bias : Tensor, optional
        (channels)
    eps : float
        Added to the variance.

    Raises
    ------
    ValueError
        A channel has fewer than two values, and no statistics are given.

    Source: Ioffe & Szegedy 2015.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.batch_norm(tensor([[1.0], [3.0]]), eps=0.0).tolist()
    [[-1.0], [1.0]]
    """
    if statistics is None:
        return counted_batch_norm(x, weight, bias, eps, over_ranks=False)[0]
    dtype = _core.float64 if x.dtype is _core.float64 else _core.float32
    mean, var = (t.to(dtype) for t in statistics)
    scale = _core.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight.to(dtype)
    offset = None if bias is None else bias.to(dtype)
    return _short_rows(_mapped(_long_rows(x), mean, scale, offset), x)


def counted_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, over_ranks: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`batch_norm` from the batch's own statistics, and return those as well.

    The statistics are each channel's mean and variance, without gradients, and a tensor of shape
    (1) with the number of elements per channel. With ``over_ranks``, forward performs two small
    all-reduces and backward performs one.
    """
    _check_batch(x, over_ranks)
    if not over_ranks and math.prod(x.shape) == x.shape[1]:
        raise ValueError(
            f"batch_norm: shape {x.shape} has one value for each channel, whose variance is 0: "
            "give a larger batch, or the statistics to use (eval() of a module)"
        )
    rows = _long_rows(x)
    sets = _Sets((*rows.shape[:2], 1), 0, over_ranks)
    y, mean, var, count = _normalized(rows, sets, weight, bias, eps)
    return _short_rows(y, x), mean.reshape(-1), var.reshape(-1), count


def batch_statistics(x: Tensor, over_ranks: bool = False) -> tuple[Tensor, Tensor]:
    """Compute each channel's mean and biased variance over batch and positions.

    Parameters
    ----------
    x : Tensor
        (batch, channels, ...), with at least one element per channel.
    over_ranks : bool
        Include all ranks' batches, which may differ in size; collective in forward and backward.

    Returns
    -------
    mean, variance : Tensor
        (channels), float32 (float64 for float64), with gradients.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> mean, var = F.batch_statistics(tensor([[1.0], [3.0]]))
    >>> mean.tolist(), var.tolist()
    ([2.0], [1.0])
    """
    _check_batch(x, over_ranks)
    rows = _long_rows(x)
    sets = _Sets((*rows.shape[:2], 1), 0, over_ranks)
    with no_grad():
        mean, var, count = (t.reshape(-1) for t in _moments(rows, sets))
    check = _check_of(rows)

    def backward(*gradients: Tensor | None) -> Tensor:
        check()
        none = _core.zeros(mean.shape, dtype=mean.dtype)
        both = _core.stack([none if g is None else g for g in gradients])
        both = (sum_over_ranks(both) if over_ranks else both) / count
        return _core.row_affine(rows, sets.rows, 2 * both[1], both[0], mean)

    joined = _core.custom([rows], [mean, var], backward)
    return joined[0], joined[1]


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum a tensor over all ranks; backward sums its gradient over all ranks. Both are collective.

    With a single rank, before :func:`fsdpc.init`, or in a dry run, the result is x.

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


class _Sets(NamedTuple):
    """The layout of rows (one per channel and batch element) in sets that share statistics."""

    shape: tuple[int, int, int]  # batch, groups, channels per group
    dim: int  # dimension of the shape whose rows share statistics; 0 or 2
    over_ranks: bool = False  # share them with all ranks

    @property
    def rows(self) -> int:
        return math.prod(self.shape)

    def values(self, t: Tensor) -> Tensor:
        """Expand per-set or per-channel values to one value per row."""
        return t if self.dim == 0 else t.expand(self.shape)

    def of_channels(self, t: Tensor, dtype: Any) -> Tensor:
        """Reshape per-channel values so that they broadcast with per-set values."""
        return t.to(dtype).reshape(1, *self.shape[1:])

    def total(self, t: Tensor) -> Tensor:
        """Sum per-row values over each set, across ranks if enabled; t has shape (..., *shape)."""
        total = t.sum(t.ndim - 3 + self.dim, True)
        return sum_over_ranks(total) if self.over_ranks else total


def _moments(x: Tensor, sets: _Sets) -> tuple[Tensor, Tensor, Tensor]:
    """Return each set's mean, variance and number of elements."""
    batch, groups, channels = sets.shape
    length = channels * math.prod(x.shape[2:])  # of a batch's part of a set, which is contiguous
    own = _core.row_moments(x, batch * groups).reshape(2, batch, groups, 1)
    means, squares = own[0], own[1]
    if sets.dim != 0:
        count = _core.full((1,), max(length, 1), dtype=means.dtype)
        return means, squares / count, count
    count = _core.full((1,), batch * length, dtype=means.dtype)
    total = means.sum(0, True) * length  # combine parts by the formula of Chan et al. 1979
    if sets.over_ranks:  # one collective for both sums
        both = sum_over_ranks(_core.concat([total.reshape(-1), count]))
        total, count = both[:-1].reshape(total.shape), both[-1:]
    mean = total / count
    away = means - mean
    return mean, sets.total(squares + away * away * length) / count, count


def _normalized(
    x: Tensor, sets: _Sets, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise sets, then scale and shift channels; mean, variance and count get no gradient.

    Let scale be a channel's weight divided by the standard deviation. Backward sums ``dy`` and ``dy
    * (x - mean)`` over each row and multiplies them by scale. With m and n, their means over a
    set::

        dx = dy * scale - m - (x - mean) / variance * n
    """
    with no_grad():
        mean, var, count = _moments(x, sets)
        rstd = _core.rsqrt(var + eps)
        scale = rstd if weight is None else rstd * sets.of_channels(weight, rstd.dtype)
        scale, shift = sets.values(scale), sets.values(mean)
        offset = None if bias is None else sets.values(sets.of_channels(bias, rstd.dtype))
        y = _core.row_affine(x, sets.rows, scale, offset, shift)
    inputs = [x, *(t for t in (weight, bias) if t is not None)]
    check, wanted = _check_of(x), x.requires_grad

    def backward(dy: Tensor) -> list[Tensor | None]:
        check()
        sums = _core.row_moments(x, sets.rows, dy, shift).reshape(2, *sets.shape)
        found: list[Tensor | None] = [None]
        if wanted:
            means = sets.total(sums * scale) / count
            m, n = means[0], means[1]
            slope, offset = sets.values(-n * rstd * rstd), sets.values(-m)
            found[0] = _core.row_affine(x, sets.rows, slope, offset, shift, dy, scale)
        if weight is not None:
            found.append((sums[1] * rstd).sum(0).reshape(-1).to(weight.dtype))
        if bias is not None:
            found.append(sums[0].sum(0).reshape(-1).to(bias.dtype))
        return found

    return _core.custom(inputs, [y], backward)[0], mean, var, count


def _mapped(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``(x - mean) * scale + bias`` per channel."""
    rows = math.prod(x.shape[:2])
    with no_grad():
        y = _core.row_affine(x, rows, scale, bias, mean)
    inputs = [x, mean, scale] if bias is None else [x, mean, scale, bias]
    check = _check_of(x, mean, scale)

    def backward(dy: Tensor) -> list[Tensor]:
        check()
        sums = _core.row_moments(x, rows, dy, mean).reshape(2, *x.shape[:2]).sum(1)
        found = [_core.row_affine(dy, rows, scale), -scale * sums[0], sums[1], sums[0]]
        return found[: len(inputs)]

    return _core.custom(inputs, [y], backward)[0]


def _check_of(*kept: Tensor) -> Callable[[], None]:
    """Return a function that raises RuntimeError if a tensor has since been modified in place."""
    versions = [t._version for t in kept]

    def check() -> None:
        if versions != [t._version for t in kept]:
            raise RuntimeError(
                "a tensor that normalisation needs for its backward was changed in place since: "
                "change a clone() instead"
            )

    return check


def _check_batch(x: Tensor, over_ranks: bool) -> None:
    if x.ndim < 2 or (math.prod(x.shape) == 0 and not over_ranks):
        raise ValueError(f"batch statistics of shape {x.shape}: give (batch, channels, ...)")


def _is_single(x: Tensor) -> bool:
    return math.prod(x.shape[2:]) == 1


def _long_rows(x: Tensor) -> Tensor:
    """Reshape x to (1, channels, batch) if its rows would have only one element."""
    return x.transpose(0, 1).reshape(1, *x.shape[1::-1]) if _is_single(x) else x


def _short_rows(y: Tensor, x: Tensor) -> Tensor:
    """Undo :func:`_long_rows`, returning a result with x's shape."""
    return y.reshape(*x.shape[1::-1]).transpose(0, 1).reshape(x.shape) if _is_single(x) else y
