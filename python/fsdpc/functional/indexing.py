"""Access elements by index: gather, scatter, sort, and ``x[array]``.

All are composed of two operations, each the gradient of the other: picking rows by id
(:func:`embedding`, for any dtype) and adding rows by id (`_core.scatter_rows`). Sums follow the
order of the ids and use float32 for 16-bit floats, so results are the same in every run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import fitted, plain_number, where, wide


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Pick elements along a dimension: ``y[i][j] = x[index[i][j]][j]`` for dim 0.

    Parameters
    ----------
    x : Tensor
        Any dtype.
    dim : int
    index : Tensor
        int32 or int64, with x's number of dimensions; it may exceed x's size only along dim.

    Returns
    -------
    Tensor
        Has the index's shape.

    Raises
    ------
    IndexError
        An index is negative or too large, or the dimension does not exist.
    ValueError
        Shapes do not match.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.gather(tensor([[1.0, 5.0], [3.0, 2.0]]), 1, tensor([[1], [0]])).tolist()
    [[5.0], [3.0]]
    """
    ids = _linear("gather", x, dim, index)
    return _rows(ids, x.reshape(-1, 1)).reshape(index.shape)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Add elements of src at the indexed positions; the counterpart of :func:`gather`.

    Parameters
    ----------
    x : Tensor
        Floats; not changed.
    dim : int
    index : Tensor
        int32 or int64; it may exceed x's size only along dim.
    src : Tensor
        Has x's dtype, and at least the index's size in every dimension.

    Returns
    -------
    Tensor
        A new tensor with x's shape.

    Raises
    ------
    IndexError
        An index is negative or too large.
    ValueError
        Shapes do not match.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> x, index = tensor([0.0, 0.0]), tensor([1, 1])
    >>> F.scatter_add(x, 0, index, tensor([2.0, 3.0])).tolist()
    [0.0, 5.0]
    """
    ids = _linear("scatter_add", x, dim, index)
    if src.ndim != index.ndim or any(s < i for s, i in zip(src.shape, index.shape, strict=True)):
        raise ValueError(f"scatter_add: src {src.shape} is smaller than index {index.shape}")
    whole = src.shape == index.shape
    taken = src if whole else src[tuple(slice(0, n) for n in index.shape)]
    added = _core.scatter_rows(ids, taken.reshape(*ids.shape, 1), math.prod(x.shape))
    return x + added.reshape(x.shape)


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Pick whole slices along a dimension, in the order given by a 1-D index.

    Parameters
    ----------
    x : Tensor
        Any dtype.
    dim : int
    index : Tensor
        (n), int32 or int64.

    Returns
    -------
    Tensor
        Has x's shape, but with size n along dim.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.index_select(tensor([[1.0, 5.0], [3.0, 2.0]]), 1, tensor([1, 1])).tolist()
    [[5.0, 5.0], [2.0, 2.0]]
    """
    if index.ndim != 1:
        raise ValueError(f"index_select: the index has shape {index.shape}; make it one row")
    axis = dimension("index_select", x, dim, 1)
    if x.ndim == 0:
        return index_select(x.reshape(1), 0, index).reshape(())
    front = x if axis == 0 else x.transpose(0, axis)
    rows = _rows(index, front.reshape(x.shape[axis], math.prod(front.shape[1:])))
    picked = rows.reshape(index.shape[0], *front.shape[1:])
    return picked if axis == 0 else picked.transpose(0, axis)


def take_along(x: Tensor, index: Any) -> Tensor:
    """Return a copy of ``x[index]``, where the index contains arrays or masks, as in NumPy."""
    index = _plain(index)
    lead = _reach(x, index)
    rows = np.arange(math.prod(x.shape[:lead]), dtype=np.int64).reshape(x.shape[:lead])
    ids = np.asarray(rows[index])
    table = x.reshape(math.prod(x.shape[:lead]), math.prod(x.shape[lead:]))
    return _rows(_core.tensor(ids), table).reshape(*ids.shape, *x.shape[lead:])


def put_along(x: Tensor, index: Any, value: Any) -> None:
    """Assign ``x[index] = value`` with arrays or masks; for repeated indices, the last wins."""
    value = plain_number(value)
    number = isinstance(value, (int, float)) and x.dtype.is_floating_point
    if number and isinstance(index, Tensor) and index.dtype is _core.bool_:
        if index.shape == x.shape:
            x.copy_(where(index, value, x))
            return
    index = _plain(index)
    lead = _reach(x, index)
    rows, dim = math.prod(x.shape[:lead]), math.prod(x.shape[lead:])
    ids = np.asarray(np.arange(rows, dtype=np.int64).reshape(x.shape[:lead])[index])
    if isinstance(value, (int, float)):
        value = _core.full((), value, dtype=x.dtype)  # raises if it does not fit
    else:
        value = value if isinstance(value, Tensor) else _core.tensor(value, x.dtype)
        value = fitted(value, x.dtype)
    if not (rows and dim and ids.size):
        return
    shape = (*ids.shape, *x.shape[lead:])
    given = value
    given = (given if given.shape == shape else given.expand(*shape)).reshape(ids.size, dim)
    recorded = _core.is_grad_enabled() and (x.requires_grad or given.requires_grad)
    if _core.device_name() == "cpu" and not recorded:
        x[:0] = 0  # increments x's version, or raises if x is read-only
        if not _core.in_dry_run():  # a dry run has nothing to write
            x.detach().bits().reshape(rows, dim)[ids.reshape(-1)] = given.detach().bits()
        return
    source = np.full(rows, -1, dtype=np.int64)
    source[ids.reshape(-1)] = np.arange(ids.size)
    written = _rows(_core.tensor(np.maximum(source, 0)), given)
    hit = _core.tensor(source[:, None] >= 0)
    x.copy_(where(hit, written, x.reshape(rows, dim)).reshape(x.shape))


def argsort(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    """Return the int64 indices that sort a dimension; the sort is stable.

    The host computes the indices, so a GPU has to wait for it.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.argsort(tensor([2.0, 3.0, 1.0])).tolist()
    [2, 0, 1]
    """
    axis = dimension("argsort", x, dim, 1)
    if x.ndim == 0:
        return _core.zeros((), dtype="int64")
    array = host(x)
    keys = _keys(array, axis, descending)
    if keys is not None:
        found = np.sort(keys, axis=axis) & _PLACES
    elif descending:  # stable: sort the reversed row and read it backwards
        found = np.argsort(np.flip(array, axis), axis=axis, kind="stable")
        found = np.flip(array.shape[axis] - 1 - found, axis)
    else:
        found = np.argsort(array, axis=axis, kind="stable")
    return _core.tensor(np.ascontiguousarray(found, dtype=np.int64))


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort along a dimension; NaN counts as the largest value, and equal elements keep their order.

    Parameters
    ----------
    x : Tensor
    dim : int
    descending : bool

    Returns
    -------
    values, indices : Tensor
        Have x's shape; indices are int64.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> values, indices = F.sort(tensor([2.0, 3.0, 1.0]))
    >>> values.tolist(), indices.tolist()
    ([1.0, 2.0, 3.0], [2, 0, 1])
    """
    indices = argsort(x, dim, descending)
    return gather(x, dim, indices), indices


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Find the k largest or smallest elements along a dimension, in sorted order.

    Parameters
    ----------
    x : Tensor
    k : int
        At most the size of dim.
    dim : int
    largest : bool

    Returns
    -------
    values, indices : Tensor
        Have size k along dim; indices are int64.

    Raises
    ------
    ValueError
        There are fewer than k elements.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> values, indices = F.topk(tensor([2.0, 3.0, 1.0]), 2)
    >>> values.tolist(), indices.tolist()
    ([3.0, 2.0], [1, 0])
    """
    axis = dimension("topk", x, dim, 1)
    if x.ndim == 0:
        if k not in (0, 1):  # torch also returns it for k = 0
            raise ValueError(f"topk: k is {k} for a tensor without dimensions")
        return x, argsort(x)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"topk: k is {k} for dimension {dim} of {x.shape[axis]} elements")
    found = _first_places(host(x), k, axis, largest) if 0 < k < x.shape[axis] else None
    if found is None:
        order = argsort(x, axis, largest)[(*(slice(None),) * axis, slice(0, k))]
    else:
        order = _core.tensor(np.ascontiguousarray(found))
    return gather(x, axis, order), order


def nonzero(x: Tensor) -> Tensor:
    """Return the int64 indices of nonzero elements, as (count, ndim); waits for a GPU.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.nonzero(tensor([[0, 7], [8, 0]])).tolist()
    [[0, 1], [1, 0]]
    """
    return _core.tensor(np.argwhere(host(x)).astype(np.int64))


def masked_fill(x: Tensor, mask: Any, value: float | Tensor) -> Tensor:
    """Replace elements of x by a number where the mask is true; these elements get no gradient.

    The number may be a 0-d tensor, in which case it gets a gradient. The result has x's dtype; a
    number that does not fit it raises ValueError.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.masked_fill(tensor([1.0, 2.0]), tensor([True, False]), 9.0).tolist()
    [9.0, 2.0]
    """
    value, floats = plain_number(value), x.dtype.is_floating_point
    if isinstance(value, Tensor) and value.ndim == 0:
        return where(mask, fitted(value, x.dtype), x)
    if isinstance(value, (Tensor, np.ndarray)):
        raise ValueError(
            f"masked_fill: a value of shape {value.shape}; give a number, or use where()"
        )
    if not floats and (isinstance(value, float) or x.dtype is _core.bool_):  # otherwise as in where
        value = _core.full((), value, dtype=x.dtype)
    return where(mask, value, x)


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Return the elements where the mask is true as a 1-D tensor; waits for a GPU.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.masked_select(tensor([1.0, 2.0, 3.0]), tensor([True, False, True])).tolist()
    [1.0, 3.0]
    """
    shape = np.broadcast_shapes(x.shape, mask.shape)
    return take_along(x.expand(shape), mask.expand(shape))


def count(n: int) -> Tensor:
    """Return 0, 1, ... n - 1 as int64, created on the current device, as captured steps require."""
    if _core.device_name() == "cpu":
        return _core.arange(n)
    row = _core.zeros(min(n, 1), dtype="int64")
    while row.shape[0] < n:
        row = _core.concat([row, row + row.shape[0]])
    return row[:n]


def host(x: Tensor) -> np.ndarray[Any, Any]:
    """Copy the values to an array that NumPy can sort; waits for a GPU."""
    return np.asarray(wide(x.detach()).numpy())


def dimension(name: str, x: Tensor, dim: int, least: int = 0) -> int:
    """Return a dimension as a nonnegative index; raise IndexError if it does not exist.

    If ``least`` is 1, a 0-d tensor counts as one-dimensional, as in PyTorch.
    """
    count = max(x.ndim, least)
    if not -count <= dim < count:
        raise IndexError(f"{name}: dimension {dim} of a tensor with {x.ndim} dimensions")
    return dim % count


def _rows(ids: Tensor, table: Tensor) -> Tensor:
    return _core.embedding(ids, table)


#: The bits of a sort key that contain the index along the dimension.
_PLACES = 0xFFFFFFFF


def _keys(array: np.ndarray[Any, Any], axis: int, descending: bool) -> Any:
    """Return integers that sort like the elements and contain the index in their low 32 bits.

    Returns None if the dtype's elements need more than 32 bits. Sorting these integers is several
    times faster than a stable sort of the elements.
    """
    if array.dtype == np.float32:
        bits = (array + np.float32(0)).view(np.int32)  # -0 becomes 0
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # flips negative numbers' bits except the sign
        keys[np.isnan(array)] = 0x7FFFFFFF
    elif array.dtype.itemsize <= 4 and array.dtype.kind in "iub":
        keys = array.astype(np.int32)
    else:
        return None
    wide = (~keys if descending else keys).astype(np.int64)
    wide <<= 32
    wide |= np.arange(array.shape[axis]).reshape(-1, *(1,) * (array.ndim - 1 - axis))
    return wide


def _first_places(array: np.ndarray[Any, Any], k: int, axis: int, descending: bool) -> Any:
    """Return the sorted indices of the first k elements, or None if :func:`_keys` returns None."""
    first = (*(slice(None),) * axis, slice(0, k))
    if axis == array.ndim - 1 and array.dtype == np.float32:  # a search by value is faster
        at = array.shape[axis] - k if descending else k - 1
        last = np.partition(array, at, axis=axis)[..., at : at + 1]
        chosen = ~(array < last) if descending else array <= last
        if (np.count_nonzero(chosen, axis=-1) == k).all():  # no ties with the last, no NaNs
            places = np.flatnonzero(chosen) % array.shape[axis]
            places = places.reshape(*array.shape[:-1], k)
            keys = _keys(np.take_along_axis(array, places, axis), axis, descending)
            return np.take_along_axis(places, np.sort(keys, axis=axis) & _PLACES, axis)
    keys = _keys(array, axis, descending)
    if keys is None:
        return None
    return np.sort(np.partition(keys, k - 1, axis=axis)[first], axis=axis) & _PLACES


def _linear(name: str, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the memory positions of the elements that the index selects.

    An out-of-range index raises IndexError; on a GPU it becomes -1, and the kernel reports a fault.
    """
    axis = dimension(name, x, dim, 1)
    fits = index.ndim == x.ndim and all(
        d == axis or i <= n for d, (i, n) in enumerate(zip(index.shape, x.shape, strict=True))
    )
    if not fits:
        raise ValueError(
            f"{name}: index {index.shape} for a tensor of shape {x.shape}; give it as many "
            f"dimensions, nowhere but along {dim} larger"
        )
    if x.ndim == 0:
        return _linear(name, x.reshape(1), 0, index.reshape(1))
    if _core.in_dry_run():  # memory has no contents in a dry run
        return _core.empty(index.shape, dtype="int64")
    if _core.device_name() == "cpu":
        found = _core.element_places(index, x.shape, axis)
        if found is None:
            low, high = int(index.numpy().min()), int(index.numpy().max())
            raise IndexError(
                f"{name}: index {low if low < 0 else high} for dimension {dim} of "
                f"{x.shape[axis]} elements; indices are 0 to {x.shape[axis] - 1}"
            )
        return found
    strides = [math.prod(x.shape[d + 1 :]) for d in range(x.ndim)]
    places = index.to("int64")
    places = places if strides[axis] == 1 else places * strides[axis]
    for d, n in enumerate(index.shape):
        if d != axis and strides[d]:
            row = count(n) * strides[d]
            places = places + row.reshape([-1 if e == d else 1 for e in range(x.ndim)])
    inside = (index >= 0) == (index < x.shape[axis])  # an index violates at most one bound
    return where(inside, places, -1)


def _plain(index: Any) -> Any:
    """Convert the tensors and lists in an index to arrays."""
    items = index if isinstance(index, tuple) else (index,)
    plain = []
    for item in items:
        if isinstance(item, (Tensor, list)):
            item = np.asarray(item.numpy() if isinstance(item, Tensor) else item)
            if item.size == 0 and item.dtype.kind == "f":
                item = item.astype(np.int64)
        if isinstance(item, np.ndarray) and item.dtype.kind not in "iub":
            raise TypeError(f"a tensor is indexed by arrays of integers or bool, not {item.dtype}")
        if isinstance(item, np.ndarray) and item.dtype == np.uint8:
            item = item.astype(np.int64)
        plain.append(item)
    return tuple(plain)


def _reach(x: Tensor, index: tuple[Any, ...]) -> int:
    """Return the number of leading dimensions that the index covers; the others are kept whole."""
    named = sum(
        0 if item is None or item is Ellipsis
        else item.ndim if isinstance(item, np.ndarray) and item.dtype == np.bool_
        else 1
        for item in index
    )  # fmt: skip
    if named > x.ndim:
        raise IndexError(f"{named} indices for a tensor with {x.ndim} dimensions")
    return x.ndim if any(item is Ellipsis for item in index) else named
