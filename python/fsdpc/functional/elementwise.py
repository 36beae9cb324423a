"""Elementwise selection and logic, built from mask and comparison kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor

Operand = Tensor | float | int


def where(condition: Any, x: Operand, y: Operand) -> Tensor:
    """Select elements from x where a condition holds, and from y elsewhere.

    Parameters
    ----------
    condition : Tensor or array_like
        A bool condition; nonzero numbers count as true. It gets no gradient.
    x, y : Tensor or number
        They broadcast with the condition, and are promoted as in arithmetic.

    Returns
    -------
    Tensor
        Has the broadcast shape. Selected elements keep their bits (a NaN stays a NaN); the others
        get no gradient, whatever their values.

    Raises
    ------
    TypeError
        Neither x nor y is a tensor, and one of them is not a number.
    ValueError
        Shapes do not broadcast, or the dtype cannot hold a number. A 0-d tensor counts as a number,
        except on a GPU, where the host would have to wait.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.tensor([-1.0, 2.0])
    >>> fsdpc.functional.where(x > 0, x, 0.0).tolist()
    [0.0, 2.0]
    """
    keep, x, y = _truth(condition), plain_number(x), plain_number(y)
    if _is_zero_beside(y, x):
        return _core.keep(x, keep)
    if _is_zero_beside(x, y):
        return _core.keep(y, keep == 0)
    x, y = _pair(x, y)
    dtype = _core.result_type(x, y)
    x, y = fitted(x, dtype), fitted(y, dtype)
    inside = "int32" if dtype.itemsize == 1 else dtype  # one-byte dtypes have no arithmetic
    chosen = _core.add(_core.mask(x.to(inside), keep), _core.mask(y.to(inside), keep == 0))
    return chosen.to(dtype)


def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """Clamp elements to [min, max]; only elements left unchanged get gradients.

    Parameters
    ----------
    x : Tensor
    min, max : Tensor or number, optional
        They broadcast with x. If min exceeds max, the result is max; if a bound is NaN, the result
        is NaN, as in PyTorch.

    Returns
    -------
    Tensor
        Has x's dtype if bounds are numbers; NaN stays NaN.

    Raises
    ------
    ValueError
        Neither bound is given, or the dtype cannot hold one.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.clamp(tensor([-2.0, 0.5, 2.0]), -1.0, 1.0).tolist()
    [-1.0, 0.5, 1.0]
    """
    if min is None and max is None:
        raise ValueError("clamp: give min, max or both")
    for bound, kernel, outside in ((min, _core.clamp_min, _below), (max, _core.clamp_max, _above)):
        if bound is None:
            continue
        bound = plain_number(bound)
        if not isinstance(bound, (int, float, Tensor)):
            bound = _core.tensor(bound)
        if isinstance(bound, float) and math.isnan(bound):
            x = where(False, x, bound)
        elif x.dtype.is_floating_point and isinstance(bound, (int, float)):
            x = kernel(x, bound)
        else:
            x = where(outside(x, bound), bound, x)
    return x


def isnan(x: Tensor) -> Tensor:
    """Return a bool tensor that is True where an element is NaN.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.isnan(tensor([1.0, float("inf"), float("nan")])).tolist()
    [False, False, True]
    """
    return x != x


def isfinite(x: Tensor) -> Tensor:
    """Return a bool tensor that is True where an element is neither infinite nor NaN.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.isfinite(tensor([1.0, float("inf"), float("nan")])).tolist()
    [True, False, False]
    """
    if not x.dtype.is_floating_point:
        return x == x
    return x - x == 0


def isinf(x: Tensor) -> Tensor:
    """Return a bool tensor that is True where an element is infinite.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.isinf(tensor([1.0, float("inf"), float("nan")])).tolist()
    [False, True, False]
    """
    if not x.dtype.is_floating_point:
        return x != x
    return _core.abs(x) == math.inf


def logical_not(x: Any) -> Tensor:
    """Return a bool tensor that is True where an element is 0 or False.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.logical_not(tensor([0, 1])).tolist()
    [True, False]
    """
    return _truth(x) == 0


def logical_and(x: Any, y: Any) -> Tensor:
    """Compute the logical AND of two tensors with broadcasting; nonzero elements count as true.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.logical_and(tensor([0, 1]), tensor([2, 3])).tolist()
    [False, True]
    """
    return logical_not(x) < _truth(y)


def logical_or(x: Any, y: Any) -> Tensor:
    """Compute the logical OR of two tensors with broadcasting; nonzero elements count as true.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.logical_or(tensor([0, 1]), tensor([0, 3])).tolist()
    [False, True]
    """
    return logical_not(x) <= _truth(y)


def logical_xor(x: Any, y: Any) -> Tensor:
    """Compute the logical XOR of two tensors with broadcasting; nonzero elements count as true.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.logical_xor(tensor([0, 1]), tensor([2, 3])).tolist()
    [True, False]
    """
    return _truth(x) != _truth(y)


def wide(x: Tensor) -> Tensor:
    """Convert 16-bit floats to float32, so that a composed operation rounds only once."""
    return x.float() if x.dtype.is_floating_point and x.dtype.itemsize == 2 else x


def _below(x: Tensor, bound: Any) -> Tensor:
    below = x < bound
    return logical_or(below, isnan(bound)) if isinstance(bound, Tensor) else below


def _above(x: Tensor, bound: Any) -> Tensor:
    above = x > bound
    return logical_or(above, isnan(bound)) if isinstance(bound, Tensor) else above


def _truth(x: Any) -> Tensor:
    x = x if isinstance(x, Tensor) else _core.tensor(x)
    return x if x.dtype is _core.bool_ else x != 0


def _is_zero_beside(value: Any, x: Any) -> bool:
    """Return whether the value is a 0 that fits x's dtype, which must be wider than a byte."""
    if not isinstance(value, (int, float)) or not isinstance(x, Tensor) or x.dtype.itemsize == 1:
        return False
    fits = x.dtype.is_floating_point or isinstance(value, int)
    return fits and value == 0 and math.copysign(1, value) > 0


def plain_number(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, so its range is checked; keep other values."""
    is_number = isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0
    return value.item() if is_number else value


def fitted(value: Tensor, dtype: _core.dtype) -> Tensor:
    """Cast a tensor; the value of a 0-d tensor must fit the dtype, except on a GPU."""
    if value.dtype is dtype:
        return value
    if value.ndim == 0 and _core.device_name() == "cpu" and not _core.in_dry_run():
        _core.full((), value.item(), dtype=dtype)
    return value.to(dtype)


def _pair(x: Operand, y: Operand) -> tuple[Tensor, Tensor]:
    """Convert both operands to tensors; a number gets the dtype that the other operand implies."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x, y
    if isinstance(x, Tensor):
        return x, _number(y, x)
    if isinstance(y, Tensor):
        return _number(x, y), y
    x = _core.tensor(x)
    return x, _number(y, x)


def _number(value: Any, other: Tensor) -> Tensor:
    if not isinstance(value, (int, float)):
        return _core.tensor(value)  # accepts an array, or raises TypeError
    if other.dtype is _core.bool_ and not isinstance(value, bool):
        return _core.full((), value, dtype="int64" if isinstance(value, int) else "float32")
    fits = other.dtype.is_floating_point or isinstance(value, int)
    return _core.full((), value, dtype=other.dtype if fits else "float32")
