"""Tensors from data, or from a shape alone: filled, numbered, drawn.

Each function takes ``dtype`` (float32 unless it says otherwise) and ``requires_grad``.  Random ones
draw the next stream of the generator that :func:`fsdpc.manual_seed` sets, so the same program makes
the same numbers on every rank; give ranks other seeds where they should differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor

__all__ = [
    "arange", "empty", "empty_like", "eye", "from_dlpack", "from_numpy", "full", "full_like",
    "linspace", "manual_seed", "ones", "ones_like", "rand", "rand_like", "randint", "randn",
    "randn_like", "tensor", "zeros", "zeros_like",
]  # fmt: skip


def tensor(data: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Copy numbers, nested sequences of them or an array into a new tensor.

    Parameters
    ----------
    data : number, sequence or numpy.ndarray
        Of any shape; Python's floats become float32, its integers int64.
    dtype : dtype, optional
        Of the result; the data's where not given.
    requires_grad : bool, default False

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.tensor([[1.0, 2.0], [3.0, 4.0]]).shape, fsdpc.tensor(3).dtype.name
    ((2, 2), 'int64')
    """
    return _core.tensor(data, dtype=dtype, requires_grad=requires_grad)


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor over an array's memory; on a GPU a copy.

    Examples
    --------
    >>> import fsdpc
    >>> import numpy as np
    >>> array = np.zeros(2, np.float32)
    >>> x = fsdpc.from_numpy(array)
    >>> array[0] = 5.0
    >>> x.tolist()
    [5.0, 0.0]
    """
    return _core.from_numpy(array)


def from_dlpack(source: Any) -> Tensor:
    """Return a tensor over the memory of another library's, by DLPack.

    Parameters
    ----------
    source : object with ``__dlpack__``
        A tensor of torch or JAX, an array of NumPy or CuPy, on the device of this process.

    Examples
    --------
    >>> import fsdpc
    >>> import numpy as np
    >>> fsdpc.from_dlpack(np.ones(2, np.float32)).tolist()
    [1.0, 1.0]
    """
    return _core.from_dlpack(source)


def manual_seed(seed: int) -> None:
    """Set the seed of dropout and initialisation and start their streams again at 0.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.manual_seed(0)
    >>> a = fsdpc.randn(3)
    >>> fsdpc.manual_seed(0)
    >>> a.tolist() == fsdpc.randn(3).tolist()
    True
    """
    _core.manual_seed(seed)


def empty(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor whose values are not set.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.empty(2, 3).shape, fsdpc.empty((2, 3)).shape
    ((2, 3), (2, 3))
    """
    return _core.empty(*shape, dtype=dtype, requires_grad=requires_grad)


def zeros(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor of zeros.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.zeros(2, 3, dtype="int32").tolist()
    [[0, 0, 0], [0, 0, 0]]
    """
    return _core.zeros(*shape, dtype=dtype, requires_grad=requires_grad)


def ones(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor of ones.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.ones(2).tolist()
    [1.0, 1.0]
    """
    return _core.ones(*shape, dtype=dtype, requires_grad=requires_grad)


def full(shape: Any, value: float, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor of one value.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.full((2,), 0.5).tolist()
    [0.5, 0.5]
    """
    return _core.full(shape, value, dtype=dtype, requires_grad=requires_grad)


def arange(start: float, stop: float | None = None, step: float = 1, dtype: Any = None) -> Tensor:
    """Count from start (0 where only one bound is given) up to stop, which is left out.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.arange(3).tolist(), fsdpc.arange(1, 2, 0.5).tolist()
    ([0, 1, 2], [1.0, 1.5])
    """
    return _core.arange(start, stop, step, dtype=dtype)


def randn(
    *shape: Any, dtype: Any = None, seed: int | None = None, requires_grad: bool = False
) -> Tensor:
    """Draw numbers, normal with mean 0 and variance 1; by a seed of their own if one is given.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.randn(2, 3, seed=0).tolist() == fsdpc.randn(2, 3, seed=0).tolist()
    True
    """
    return _core.randn(*shape, dtype=dtype, seed=seed, requires_grad=requires_grad)


def linspace(start: float, stop: float, steps: int, dtype: Any = None) -> Tensor:
    """Make so many numbers at equal distances, both ends among them; rounded once.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.linspace(0, 1, 5).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    return _core.tensor(np.linspace(start, stop, steps)).to(dtype or _core.float32)


def eye(rows: int, cols: int | None = None, dtype: Any = None) -> Tensor:
    """Make a matrix with ones on its diagonal; it is square unless cols are given.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.eye(2, 3).tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    return _core.tensor(np.eye(rows, cols)).to(dtype or _core.float32)


def rand(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Draw numbers, uniform in [0, 1).

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.rand(2, 3)
    >>> x.shape, 0.0 <= float(x.min().item()) <= float(x.max().item()) < 1.0
    ((2, 3), True)
    """
    return _drawn(empty(*shape, dtype=dtype), "uniform", 0.0, 1.0, requires_grad)


def randint(low: int, high: int, shape: Any, dtype: Any = None) -> Tensor:
    """Draw integers, uniform in [low, high), int64 unless a dtype is given.

    Raises
    ------
    ValueError
        There is no integer between the bounds, or more than 2^53.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.randint(0, 10, (2, 3))
    >>> x.shape, x.dtype.name, set(x.flatten().tolist()) <= set(range(10))
    ((2, 3), 'int64', True)
    """
    if not 0 < high - low <= 2**53:
        raise ValueError(f"randint: no range of integers, [{low}, {high})")
    drawn = _drawn(empty(shape, dtype="float64"), "uniform", 0.0, 1.0, False)
    steps = np.minimum(np.floor(drawn.numpy() * (high - low)), high - low - 1).astype(np.int64)
    return _core.tensor(steps + low).to(dtype or _core.int64)


def zeros_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make zeros of another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.zeros_like(fsdpc.ones(2, 2)).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    return zeros(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def ones_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make ones of another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.ones_like(fsdpc.zeros(2), dtype="int32").tolist()
    [1, 1]
    """
    return ones(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def full_like(x: Tensor, value: float, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Repeat a number in another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.full_like(fsdpc.zeros(2), 7.0).tolist()
    [7.0, 7.0]
    """
    return full(x.shape, value, dtype=dtype or x.dtype, requires_grad=requires_grad)


def empty_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor of another's shape and dtype, whatever its memory holds.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.empty_like(fsdpc.zeros(2, 3), dtype="bfloat16").shape
    (2, 3)
    """
    return empty(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def rand_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Draw numbers, uniform in [0, 1), in another tensor's shape and dtype.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.rand_like(fsdpc.zeros(2, 3))
    >>> x.shape, 0.0 <= float(x.min().item()) <= float(x.max().item()) < 1.0
    ((2, 3), True)
    """
    return rand(x.shape, dtype=dtype or x.dtype, requires_grad=requires_grad)


def randn_like(x: Tensor, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Draw normal numbers in another tensor's shape and dtype.

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
