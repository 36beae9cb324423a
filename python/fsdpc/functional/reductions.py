"""Cumulative sums, and all reductions except sum and mean.

The host finds the extrema, so a GPU has to wait; :func:`gather` picks them, so only the picked
element (the first among equals) gets a gradient. All other reductions are composed of sums. 16-bit
floats are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import where, wide
from fsdpc.functional.indexing import dimension, gather, host

Dims = int | Sequence[int] | None


class ValuesIndices(NamedTuple):
    """The elements found, and their int64 indices along the dimension.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> found = F.max(tensor([[1.0, 5.0], [7.0, 2.0]]), 1)
    >>> found.values.tolist(), found.indices.tolist()
    ([5.0, 7.0], [1, 0])
    """

    values: Tensor
    indices: Tensor


def max(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Find the largest elements.

    Parameters
    ----------
    x : Tensor
        Any dtype; NaN counts as largest.
    dim : int, optional
        The dimension to reduce; all elements by default.
    keepdim : bool
        Whether to keep the dimension, with size 1.

    Returns
    -------
    Tensor or ValuesIndices
        A scalar without `dim`; otherwise values and int64 indices, the first among equal elements.

    Raises
    ------
    ValueError
        The tensor is empty.
    IndexError
        The dimension does not exist.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.max(tensor([[1.0, 5.0], [3.0, 2.0]])).item()
    5.0
    >>> values, indices = F.max(tensor([[1.0, 5.0], [3.0, 2.0]]), dim=1)
    >>> values.tolist(), indices.tolist()
    ([5.0, 3.0], [1, 0])
    """
    return _extremum("max", argmax, x, dim, keepdim)


def min(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Find the smallest elements; see :func:`max`.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.min(tensor([[1.0, 5.0], [3.0, 2.0]])).item()
    1.0
    >>> values, indices = F.min(tensor([[1.0, 5.0], [3.0, 2.0]]), dim=1)
    >>> values.tolist(), indices.tolist()
    ([1.0, 2.0], [0, 1])
    """
    return _extremum("min", argmin, x, dim, keepdim)


def amax(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Find the largest elements over one, several or all dimensions; see :func:`max`.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.amax(tensor([[1.0, 5.0], [3.0, 2.0]]), dim=1).tolist()
    [5.0, 3.0]
    """
    return _over("amax", max, x, dim, keepdim)


def amin(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Find the smallest elements over one, several or all dimensions; see :func:`max`.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.amin(tensor([[1.0, 5.0], [3.0, 2.0]]), dim=1).tolist()
    [1.0, 2.0]
    """
    return _over("amin", min, x, dim, keepdim)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the indices of the largest elements.

    Parameters
    ----------
    x : Tensor
    dim : int, optional
        The dimension to search; by default, all elements as one row.
    keepdim : bool
        Whether to keep the dimension, with size 1.

    Returns
    -------
    Tensor
        int64 indices: of a NaN if there is one, and of the first among equal elements.

    Raises
    ------
    ValueError
        The tensor is empty.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.argmax(tensor([[1.0, 5.0], [3.0, 2.0]]), dim=1).tolist()
    [1, 0]
    """
    return _where_extreme("argmax", np.argmax, x, dim, keepdim)


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the indices of the smallest elements; see :func:`argmax`.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.argmin(tensor([[1.0, 5.0], [3.0, 2.0]]), dim=1).tolist()
    [0, 1]
    """
    return _where_extreme("argmin", np.argmin, x, dim, keepdim)


def any(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Test whether any element is nonzero, over some or all dimensions.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.any(tensor([[0, 0], [2, 0]]), dim=1).tolist()
    [False, True]
    """
    return _core.sum((x != 0).float(), dim, keepdim) > 0  # a sum of ones never rounds to 0


def all(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Test whether all elements are nonzero, over some or all dimensions.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.all(tensor([[1, 0], [2, 3]]), dim=1).tolist()
    [False, True]
    """
    return _core.sum((x == 0).float(), dim, keepdim) == 0


def var(x: Tensor, dim: Dims = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    """Compute the variance over some or all dimensions.

    Parameters
    ----------
    x : Tensor
        Floats.
    dim : int or sequence of int, optional
    correction : float
        Subtracted from the number of elements (1: unbiased). If the difference is not positive, the
        result is NaN, or inf if elements differ, as in PyTorch.
    keepdim : bool

    Returns
    -------
    Tensor
        Has x's dtype.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.var(tensor([1.0, 2.0, 3.0])).item()
    1.0
    """
    w = wide(x)
    away = w - _core.mean(w, dim, True)
    total = _core.sum_squares(away, dim, keepdim)
    left = _count(x, dim) - correction
    return (total / left if left > 0 else total * math.inf).to(x.dtype)


def std(x: Tensor, dim: Dims = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    """Compute the standard deviation, the square root of :func:`var`, with gradient 0 at 0.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.std(tensor([1.0, 3.0]), correction=0).item()
    1.0
    """
    return _root(var(wide(x), dim, correction, keepdim), 2).to(x.dtype)


def norm(x: Tensor, p: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Compute the vector norm ``sum(abs(x) ** p) ** (1 / p)`` over some or all dimensions.

    Parameters
    ----------
    x : Tensor
        Floats.
    p : float
        Positive; with inf, the norm is the largest magnitude.
    dim : int or sequence of int, optional
    keepdim : bool

    Returns
    -------
    Tensor
        Has x's dtype. If the norm is 0, so is its gradient.

    Raises
    ------
    ValueError
        p is not positive.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.norm(tensor([3.0, 4.0])).item()
    5.0
    """
    if not p > 0:
        raise ValueError(f"norm: p is {p}; it must be positive")
    if p == math.inf:
        return amax(_core.abs(x), dim, keepdim)
    if p == 1:
        return _core.sum(_core.abs(wide(x)), dim, keepdim).to(x.dtype)
    if p == 2:
        total = _core.sum_squares(x, dim, keepdim)
    else:
        total = _core.sum(_core.pow(_core.abs(wide(x)), p), dim, keepdim)
    return _root(total, p).to(x.dtype)


def cumsum(x: Tensor, dim: int) -> Tensor:
    """Compute cumulative sums along a dimension.

    Parameters
    ----------
    x : Tensor
        Floats, or integers and bool, whose sums are int64.
    dim : int

    Returns
    -------
    Tensor
        Has x's shape. Floats are added in float64 and rounded once; integers wrap.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.cumsum(tensor([[1.0, 5.0], [3.0, 2.0]]), dim=1).tolist()
    [[1.0, 6.0], [3.0, 5.0]]
    """
    return _core.cumsum(x if x.dtype.is_floating_point else x.to("int64"), dim)


def logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Compute ``log(sum(exp(x)))`` along a dimension without overflow.

    The result is -inf if all elements are -inf or the dimension is empty.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> round(F.logsumexp(tensor([0.0, 0.0]), dim=0).item(), 4)  # log(2)
    0.6931
    """
    return _core.logsumexp(x, dim, keepdim)


def _root(total: Tensor, p: float) -> Tensor:
    """Compute the p-th root, with gradient 0 at 0."""
    positive = where(total == 0, 1.0, total)  # the root's slope is finite there
    root = _core.sqrt(positive) if p == 2 else _core.pow(positive, 1 / p)
    return where(total == 0, 0.0, root)


def _count(x: Tensor, dim: Dims) -> int:
    dims = range(x.ndim) if dim is None else dim if isinstance(dim, Iterable) else [dim]
    return math.prod(x.shape[d] for d in dims) if x.ndim else 1


def _where_extreme(
    name: str, find: Callable[..., Any], x: Tensor, dim: int | None, keepdim: bool
) -> Tensor:
    axis = None if dim is None else dimension(name, x, dim, 1)
    axis = axis if x.ndim else None
    if (math.prod(x.shape) if axis is None else x.shape[axis]) == 0:
        raise ValueError(f"{name}: there is no element among shape {x.shape}, dim {dim}")
    return _core.tensor(np.asarray(find(host(x), axis=axis, keepdims=keepdim), dtype=np.int64))


def _extremum(
    name: str, find: Callable[..., Tensor], x: Tensor, dim: int | None, keepdim: bool
) -> Any:
    if dim is None:
        row = x.reshape(-1)
        chosen = gather(row, 0, find(row, 0, True))
        return chosen.reshape((1,) * x.ndim if keepdim else ())
    axis = dimension(name, x, dim, 1)
    indices = find(x, axis, True)
    values = gather(x, axis, indices)
    if not keepdim:
        values, indices = values.squeeze(axis), indices.squeeze(axis)
    return ValuesIndices(values, indices)


def _over(name: str, find: Callable[..., Any], x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    if dim is None:
        return find(x, None, keepdim)
    axes = sorted(dimension(name, x, d, 1) for d in (dim if isinstance(dim, Iterable) else [dim]))
    twice = [a for a, b in zip(axes, axes[1:], strict=False) if a == b]
    if twice:
        raise ValueError(f"{name}: dimension {twice[0]} is named twice")
    for axis in reversed(axes):
        x = find(x, axis, keepdim).values
    return x
