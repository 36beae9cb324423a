"""Create tensors from data, or from a shape with constant, consecutive or random values.

Each function accepts ``requires_grad`` and ``dtype``, which is usually float32 by default. Random
functions use the next stream of the generator seeded by :func:`fsdpc.manual_seed`. A program
therefore draws the same numbers on every rank; to avoid this, seed ranks differently.
"""

from __future__ import annotations

from typing import Any

from fsdpc import _core
from fsdpc._core import (
    Tensor,
    arange,
    empty,
    from_dlpack,
    from_numpy,
    full,
    linspace,
    manual_seed,
    ones,
    randint,
    randn,
    tensor,
    zeros,
)

__all__ = [
    "arange", "empty", "empty_like", "eye", "from_dlpack", "from_numpy", "full", "full_like",
    "linspace", "manual_seed", "ones", "ones_like", "rand", "rand_like", "randint", "randn",
    "randn_like", "tensor", "zeros", "zeros_like",
]  # fmt: skip


def eye(rows: int, cols: int | None = None, dtype: Any = None) -> Tensor:
    """Create a matrix with ones on its diagonal; it is square unless `cols` is given.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.eye(2, 3).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    x = zeros(rows, rows if cols is None else cols, dtype=dtype)
    between = x.shape[1] + 1
    x.reshape(-1)[: min(x.shape) * between : between] = 1.0
    return x


def rand(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Draw numbers uniformly from [0, 1).

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.rand(2, 3)
    >>> x.shape, 0.0 <= float(x.min().item()) <= float(x.max().item()) < 1.0
    ((2, 3), True)
    """
    return _drawn(empty(*shape, dtype=dtype), "uniform", 0.0, 1.0, requires_grad)


def zeros_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Create zeros with another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.zeros_like(fsdpc.ones(2, 2)).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    return zeros(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def ones_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Create ones with another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.ones_like(fsdpc.zeros(2), dtype="int32").tolist()
    [1, 1]
    """
    return ones(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def full_like(x: Tensor, value: float, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Create a tensor filled with a number, with another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.full_like(fsdpc.zeros(2), 7.0).tolist()
    [7.0, 7.0]
    """
    return full(x.shape, value, dtype=dtype or x.dtype, requires_grad=requires_grad)


def empty_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Create an uninitialised tensor with another's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.empty_like(fsdpc.zeros(2, 3), dtype="bfloat16").shape
    (2, 3)
    """
    return empty(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def rand_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Draw numbers uniformly from [0, 1), with another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.rand_like(fsdpc.zeros(2, 3))
    >>> x.shape, 0.0 <= float(x.min().item()) <= float(x.max().item()) < 1.0
    ((2, 3), True)
    """
    return rand(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def randn_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Draw normally distributed numbers, with another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.manual_seed(0)
    >>> a = fsdpc.randn_like(fsdpc.zeros(2, 3))
    >>> fsdpc.manual_seed(0)
    >>> a.tolist() == fsdpc.randn_like(fsdpc.zeros(2, 3)).tolist()
    True
    """
    return randn(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def _drawn(x: Tensor, kind: str, a: float, b: float, requires_grad: bool) -> Tensor:
    _core.init_(x, kind, a, b, _core.initial_seed(), _core.next_stream())
    return x.requires_grad_(requires_grad)
