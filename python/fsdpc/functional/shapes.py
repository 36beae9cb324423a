"""Split, join, pad, reorder and repeat tensors, and compute the einsum of two tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import index

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import where
from fsdpc.functional.indexing import count, dimension, index_select


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors of the same dtype along a dimension; PyTorch's name for :func:`concat`.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.cat([tensor([1, 2]), tensor([3])]).tolist()
    [1, 2, 3]
    """
    return _core.concat(tensors, dim)


def split(x: Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    """Split a tensor into parts along a dimension.

    Parameters
    ----------
    x : Tensor
    sizes : int or sequence of int
        Size of every part (the last may be smaller), or of each part.
    dim : int

    Raises
    ------
    ValueError
        The sizes do not sum to the dimension's size, or one is negative.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> [part.tolist() for part in F.split(tensor([1, 2, 3]), [1, 2])]
    [[1], [2, 3]]
    """
    axis = dimension("split", x, dim)
    extent = x.shape[axis]
    if isinstance(sizes, Iterable):
        each = [index(size) for size in sizes]
    elif extent == 0 and sizes >= 0:
        each = [0]
    elif sizes <= 0:
        raise ValueError(
            f"split: parts of {sizes} for dimension {dim} of {extent} elements; give at least 1"
        )
    else:
        each = [min(index(sizes), extent - first) for first in range(0, extent, index(sizes))]
    if sum(each) != extent or min(each, default=0) < 0:
        raise ValueError(
            f"split: sizes {each} for dimension {dim} of {extent} elements; give sizes of at least "
            "0 that add up to it"
        )
    ends = [0, *accumulate(each)]
    lead = (slice(None),) * axis
    return [x[(*lead, slice(a, b))] for a, b in zip(ends, ends[1:], strict=False)]


def chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """Split a tensor into at most ``chunks`` equal parts; the last part may be smaller.

    An empty dimension is split into ``chunks`` empty parts.

    Raises
    ------
    ValueError
        ``chunks`` is not positive.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> [part.tolist() for part in F.chunk(tensor([1, 2, 3]), 2)]
    [[1, 2], [3]]
    """
    chunks = index(chunks)
    if chunks < 1:
        raise ValueError(f"chunk: {chunks} parts; at least 1")
    extent = x.shape[dimension("chunk", x, dim)]
    return split(x, -(-extent // chunks) if extent else [0] * chunks, dim)


def pad(x: Tensor, widths: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Add elements around a tensor.

    Parameters
    ----------
    x : Tensor
    widths : sequence of int
        Number of elements to add before and after the last dimension, then the second last, and so
        on, as in PyTorch; negative numbers remove elements.
    mode : {"constant", "reflect", "replicate"}
        What to add: a value, the elements mirrored at the edges, or copies of the edges.
    value : float

    Returns
    -------
    Tensor

    Raises
    ------
    ValueError
        There are more widths than dimensions, or too few elements to remove or to mirror.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.pad(tensor([1.0, 2.0]), (1, 2)).tolist()
    [0.0, 1.0, 2.0, 0.0, 0.0]
    """
    if len(widths) % 2 or len(widths) > 2 * x.ndim:
        raise ValueError(f"pad: {len(widths)} widths for {x.ndim} dimensions; give two each")
    for i in range(0, len(widths), 2):
        axis, before, after = x.ndim - 1 - i // 2, int(widths[i]), int(widths[i + 1])
        if before or after:
            x = _pad_one(x, axis, before, after, mode, value)
    return x


def _pad_one(x: Tensor, axis: int, before: int, after: int, mode: str, value: float) -> Tensor:
    extent = x.shape[axis]
    if extent - max(0, -before) - max(0, -after) < 0:
        raise ValueError(f"pad: widths {before}, {after} for {extent} elements")
    if mode in ("reflect", "replicate"):
        places = np.arange(-before, extent + after)
        if mode == "replicate":
            places = np.clip(places, 0, extent - 1)
        elif max(before, after) >= extent:
            raise ValueError(f"pad: widths {before}, {after} reflect only {extent} elements")
        else:
            places = extent - 1 - np.abs(extent - 1 - np.abs(places))
        return index_select(x, axis, _core.tensor(places.astype(np.int64)))
    if mode != "constant":
        raise ValueError(f"pad: mode is 'constant', 'reflect' or 'replicate', not '{mode}'")
    x = x[(*(slice(None),) * axis, slice(max(0, -before), extent - max(0, -after)))]

    def added(width: int) -> list[Tensor]:
        shape = (*x.shape[:axis], width, *x.shape[axis + 1 :])
        return [_core.full(shape, value, dtype=x.dtype)] if width > 0 else []

    return _core.concat([*added(before), x, *added(after)], axis)


def flip(x: Tensor, dims: int | Sequence[int]) -> Tensor:
    """Return a copy with the elements along the given dimensions reversed.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.flip(tensor([1, 2, 3]), 0).tolist()
    [3, 2, 1]
    """
    return _core.flip(x, dims)


def roll(x: Tensor, shift: int, dim: int) -> Tensor:
    """Shift elements along a dimension; those shifted past its end wrap around to the beginning.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.roll(tensor([1, 2, 3]), 1, 0).tolist()
    [3, 1, 2]
    """
    return _core.roll(x, shift, dim)


def repeat(x: Tensor, *counts: int | Sequence[int]) -> Tensor:
    """Repeat a whole tensor along its dimensions.

    Parameters
    ----------
    x : Tensor
    counts : int or sequence of int
        Number of copies along each dimension; extra counts add dimensions in front.

    Raises
    ------
    ValueError
        There are fewer counts than dimensions, or one is negative.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.repeat(tensor([1, 2]), 2).tolist()
    [1, 2, 1, 2]
    """
    first = counts[0] if counts else ()
    each = [index(n) for n in (first if isinstance(first, Iterable) else counts)]
    if len(each) < x.ndim or any(n < 0 for n in each):
        raise ValueError(f"repeat: counts {each} for a tensor of {x.ndim} dimensions")
    shape = [1] * (len(each) - x.ndim) + list(x.shape)
    for dim in range(len(each)):  # one at a time, to avoid extra dimensions
        if each[dim] != 1:
            rest = math.prod(shape[dim:])
            rows = x.reshape(math.prod(shape[:dim]), 1, rest)
            shape[dim] *= each[dim]
            x = rows.expand(rows.shape[0], each[dim], rest).reshape(*shape)
    return x.reshape(*shape)


def repeat_interleave(x: Tensor, repeats: int, dim: int) -> Tensor:
    """Repeat each element along a dimension, keeping its copies adjacent.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.repeat_interleave(tensor([1, 2]), 2, 0).tolist()
    [1, 1, 2, 2]
    """
    axis = dimension("repeat_interleave", x, dim)
    if repeats < 0:
        raise ValueError(f"repeat_interleave: {repeats} repeats; give at least 0")
    before, extent, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    rows = x.reshape(math.prod(before) * extent, 1, math.prod(after))
    copies = rows.expand(rows.shape[0], repeats, rows.shape[2])
    return copies.reshape(*before, extent * repeats, *after)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Compute the outer product of two vectors: (n), (m) -> (n, m).

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.outer(tensor([1.0, 2.0]), tensor([3.0, 4.0])).tolist()
    [[3.0, 4.0], [6.0, 8.0]]
    """
    if a.ndim != 1 or b.ndim != 1:
        raise ValueError(f"outer: shapes {a.shape} and {b.shape}; give two rows")
    return a.reshape(-1, 1) * b


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Keep the lower triangle of (..., rows, cols), up to a diagonal, and zero the others.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.tril(tensor([[1, 2], [3, 4]])).tolist()
    [[1, 0], [3, 4]]
    """
    rows, cols = _matrix("tril", x)
    return where(lower(rows, cols, diagonal), x, False)  # False is 0 in every dtype


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Keep the upper triangle of (..., rows, cols), from a diagonal on, and zero the others.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.triu(tensor([[1, 2], [3, 4]])).tolist()
    [[1, 2], [0, 4]]
    """
    rows, cols = _matrix("triu", x)
    return where(lower(rows, cols, diagonal - 1), False, x)


def lower(rows: int, cols: int, diagonal: int = 0) -> Tensor:
    """Return a (rows, cols) bool mask that is True where the column is at most row + diagonal."""
    return count(cols) <= count(rows).reshape(-1, 1) + diagonal


def _matrix(name: str, x: Tensor) -> tuple[int, int]:
    if x.ndim < 2:
        raise ValueError(f"{name}: a tensor of {x.ndim} dimensions; at least 2 are needed")
    return x.shape[-2], x.shape[-1]


def one_hot(ids: Tensor, num_classes: int) -> Tensor:
    """Encode class ids as one-hot int64 vectors: (...) -> (..., num_classes).

    On a GPU, ids are not checked, because that would require waiting; an invalid id yields zeros.

    Raises
    ------
    IndexError
        An id is negative, or at least num_classes.
    TypeError
        Ids are floats.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.one_hot(tensor([2, 0]), 3).tolist()
    [[0, 0, 1], [1, 0, 0]]
    """
    if ids.dtype.is_floating_point:
        raise TypeError(f"one_hot: ids are integers, not {ids.dtype.name}")
    if _core.device_name() == "cpu" and not _core.in_dry_run() and ids.numel():
        values = ids.numpy()
        for id_ in (values.min(), values.max()):
            if not 0 <= id_ < num_classes:
                raise IndexError(f"one_hot: id {id_} of {num_classes} classes, from 0 on")
    return (ids.unsqueeze(-1) == count(num_classes)).to("int64")


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Multiply two tensors and sum over named indices with one (batched) matrix product.

    Parameters
    ----------
    equation : str
        Letters for the dimensions of both, and of the result: ``"bij,bjk->bik"``. Without an arrow,
        the result has the letters that occur once, in alphabetical order. An operand cannot repeat
        a letter. ``...`` means the dimensions without a letter: ``"...ij,jk->...ik"``.
    a, b : Tensor
        Both have the same dtype. Dimensions of size 1 broadcast.

    Returns
    -------
    Tensor

    Raises
    ------
    ValueError
        The equation does not match the shapes.

    Examples
    --------
    >>> import fsdpc
    >>> x = fsdpc.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> fsdpc.functional.einsum("ij,kj->ik", x, x).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    left, right, out = _parse(equation, a, b)
    a, b = _broadcast(a, left, b, right)
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    a, left = _add_up(a, left, right + out)
    b, right = _add_up(b, right, left + out)
    batch = [c for c in left if c in right and c in out]
    inner = [c for c in left if c in right and c not in out]
    rows = [c for c in left if c not in right]
    cols = [c for c in right if c not in left]

    def matrix(x: Tensor, letters: str, first: list[str], second: list[str]) -> Tensor:
        turned = x.permute(*(letters.index(c) for c in batch + first + second))
        extent = [math.prod(sizes[c] for c in part) for part in (batch, first, second)]
        return turned.reshape(*extent)

    product = _core.matmul(matrix(a, left, rows, inner), matrix(b, right, inner, cols))
    letters = batch + rows + cols
    product = product.reshape(*(sizes[c] for c in letters))
    return product.permute(*(letters.index(c) for c in out))


def _parse(equation: str, a: Tensor, b: Tensor) -> tuple[str, str, str]:
    """Return the letters for the dimensions of a, b and the result; digits replace "..."."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    if not arrow:
        both = (left + right).replace("...", "")
        out = "..." * ("..." in operands)
        out += "".join(sorted(c for c in set(both) if both.count(c) == 1))
    named = [part.replace("...", "", 1) for part in (left, right, out)]
    fits = comma and all(not p or p.isalpha() and len(set(p)) == len(p) for p in named)
    if not fits or set(named[2]) - set(named[0] + named[1]):
        raise ValueError(f"einsum: {equation!r}; write it like 'ij,jk->ik', of two operands")
    more = [x.ndim - len(letters) for x, letters in zip((a, b), named, strict=False)]
    for x, letters, extra in ((a, left, more[0]), (b, right, more[1])):
        if extra < 0 or (extra > 0 and "..." not in letters):
            raise ValueError(f"einsum: {letters!r} for a tensor of shape {x.shape}")
    if max(more) > 10:
        raise ValueError(f"einsum: '...' of {equation!r} stands for {max(more)} dimensions; 10 fit")
    left, right, out = (
        part.replace("...", "9876543210"[10 - extra :])
        for part, extra in zip((left, right, out), (*more, max(more)), strict=True)
    )
    for c in set(left) & set(right):
        n, m = a.shape[left.index(c)], b.shape[right.index(c)]
        if n != m and 1 not in (n, m):
            what = "a dimension of '...'" if c.isdigit() else f"index {c!r}"
            raise ValueError(f"einsum: {what} of {equation!r} has {n} and {m} elements")
    return left, right, out


def _broadcast(a: Tensor, left: str, b: Tensor, right: str) -> tuple[Tensor, Tensor]:
    """Expand dimensions of size 1 to the size that the other operand has for that index."""
    sizes: dict[str, int] = {}
    for x, letters in ((a, left), (b, right)):
        for c, n in zip(letters, x.shape, strict=True):
            sizes[c] = n if sizes.get(c, 1) == 1 else sizes[c]
    return a.expand(*(sizes[c] for c in left)), b.expand(*(sizes[c] for c in right))


def _add_up(x: Tensor, letters: str, kept: str) -> tuple[Tensor, str]:
    """Sum over indices that occur in neither the other operand nor the result."""
    gone = [i for i, c in enumerate(letters) if c not in kept]
    if not gone:
        return x, letters
    return _core.sum(x, gone), "".join(c for c in letters if c in kept)
