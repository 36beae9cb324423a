"""Convolutions and pooling over height and width; 1-D inputs are treated as having height 1.

CPUs have kernels for them. On GPUs, convolutions and pooling are composed of other operations: a
window of k elements becomes k strided slices of the padded input. Convolutions join these slices as
columns for one matrix product (im2col), and therefore keep k times the input for backward. Pooling
takes the maximum or the sum of these slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.functional.elementwise import isnan, logical_or, where, wide
from fsdpc.functional.shapes import pad

Pair = int | Sequence[int]
Sides = list[tuple[int, int]]


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve images with filters (a cross-correlation, as in PyTorch).

    Parameters
    ----------
    x : Tensor
        (batch, channels, height, width)
    weight : Tensor
        (out, channels / groups, kernel height, kernel width), in x's dtype.
    bias : Tensor, optional
        (out)
    stride, dilation : int or two ints
        Distance between windows, and between a window's elements.
    padding : int, two ints, "same" or "valid"
        Zeros added on both sides of height and width.
    groups : int
        Number of independent groups that channels and filters are divided into.

    Returns
    -------
    Tensor
        (batch, out, height, width)

    Raises
    ------
    ValueError
        Shapes do not match, or the padded input is smaller than a window.

    Notes
    -----
    The weight is multiplied with windows of x, which are built during the product, one cache-sized
    block at a time. x is kept for backward; on GPUs, kernel height x width copies of x.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> x, weight = tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), tensor([[[[1.0, 1.0], [1.0, 1.0]]]])
    >>> F.conv2d(x, weight).tolist()
    [[[[10.0]]]]
    """
    _check_convolution("conv2d", x, weight, bias, groups)
    return _convolved("conv2d", x, weight, bias, stride, padding, dilation, groups)


def _convolved(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair | str,
    dilation: Pair,
    groups: int,
) -> Tensor:
    kernel, steps, spread = weight.shape[2:], pair(stride), pair(dilation)
    sides = _sides(name, x, padding, kernel, steps, spread)
    if x.device == "cuda":
        return _on_cuda(x, weight, bias, sides, steps, spread, groups)
    return _core.conv2d(x, weight, bias, steps, sum(sides, ()), spread, groups)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int | str = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve sequences with filters; see :func:`conv2d`.

    Parameters
    ----------
    x : Tensor
        (batch, channels, length)
    weight : Tensor
        (out, channels / groups, kernel length)
    bias : Tensor, optional
        (out)
    stride, padding, dilation, groups : int
        As for :func:`conv2d`.

    Returns
    -------
    Tensor
        (batch, out, length)

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> x, weight = tensor([[[1.0, 2.0, 4.0]]]), tensor([[[1.0, -1.0]]])
    >>> F.conv1d(x, weight).tolist()
    [[[-1.0, -2.0]]]
    """
    _check_convolution("conv1d", x, weight, bias, groups)
    x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    given = padding if isinstance(padding, str) else (0, padding)
    spread = (1, dilation)
    return _convolved("conv1d", x, weight, bias, (1, stride), given, spread, groups).squeeze(2)


def max_pool2d(x: Tensor, kernel: Pair, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Take the maximum of each window.

    Parameters
    ----------
    x : Tensor
        (batch, channels, height, width), floats; NaN counts as largest.
    kernel : int or two ints
    stride : int or two ints, optional
        The kernel's size by default.
    padding : int or two ints
        Number of padding elements on both sides; these are never the maximum.

    Returns
    -------
    Tensor
        (batch, channels, height, width). Among equal elements, the first gets the gradient.

    Raises
    ------
    ValueError
        The padded input is smaller than a window.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.max_pool2d(tensor([[[[1.0, 3.0], [5.0, 7.0]]]]), 2).tolist()
    [[[[7.0]]]]
    """
    return _max_pool("max_pool2d", x, kernel, stride, padding)


def _max_pool(name: str, x: Tensor, kernel: Pair, stride: Pair | None, padding: Pair) -> Tensor:
    size = pair(kernel)
    steps = size if stride is None else pair(stride)
    sides = _sides(name, x, padding, size, steps, (1, 1))
    if x.device != "cuda":
        return _core.pool2d(x, True, size, steps, pair(padding))
    padded = _padded(x, sides, -math.inf)
    best, *others = _windows(padded, size, steps, (1, 1), (2, 3))
    for other in others:
        best = where(logical_or(other > best, isnan(other)), other, best)
    return best


def avg_pool2d(x: Tensor, kernel: Pair, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Average each window, counting padding as zeros; see :func:`max_pool2d`.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.avg_pool2d(tensor([[[[1.0, 3.0], [5.0, 7.0]]]]), 2).tolist()
    [[[[4.0]]]]
    """
    return _avg_pool("avg_pool2d", x, kernel, stride, padding)


def _avg_pool(name: str, x: Tensor, kernel: Pair, stride: Pair | None, padding: Pair) -> Tensor:
    size = pair(kernel)
    steps = size if stride is None else pair(stride)
    sides = _sides(name, x, padding, size, steps, (1, 1))
    if x.device != "cuda":
        return _core.pool2d(x, False, size, steps, pair(padding))
    padded = _padded(wide(x), sides, 0.0)
    total, *others = _windows(padded, size, steps, (1, 1), (2, 3))
    for other in others:
        total = total + other
    return (total / math.prod(size)).to(x.dtype)


def max_pool1d(x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """Take the maximum of each window, for input of shape (batch, channels, length).

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.max_pool1d(tensor([[[1.0, 3.0, 5.0, 7.0]]]), 2).tolist()
    [[[3.0, 7.0]]]
    """
    steps = (1, kernel if stride is None else stride)
    _check_rows("max_pool1d", x)
    return _max_pool("max_pool1d", x.unsqueeze(2), (1, kernel), steps, (0, padding)).squeeze(2)


def avg_pool1d(x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
    """Average each window of (batch, channels, length), counting padding as zeros.

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> F.avg_pool1d(tensor([[[1.0, 3.0, 5.0, 7.0]]]), 2).tolist()
    [[[2.0, 6.0]]]
    """
    steps = (1, kernel if stride is None else stride)
    _check_rows("avg_pool1d", x)
    return _avg_pool("avg_pool1d", x.unsqueeze(2), (1, kernel), steps, (0, padding)).squeeze(2)


def _check_rows(name: str, x: Tensor) -> None:
    if x.ndim != 3:
        raise ValueError(f"{name}: x has shape {x.shape}; give (batch, channels, length)")


def _check_convolution(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int
) -> None:
    """Check shapes; errors name the operation and show the caller's shapes."""
    ndim = 3 if name == "conv1d" else 4
    if x.ndim != ndim or weight.ndim != ndim:
        raise ValueError(
            f"{name}: x {x.shape} and weight {weight.shape}; both need {ndim} dimensions"
        )
    out, part = weight.shape[:2]
    if groups < 1 or out % groups or part * groups != x.shape[1]:
        raise ValueError(
            f"{name}: x has {x.shape[1]} channels and weight {weight.shape}, in {groups} groups"
        )
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"{name}: bias {bias.shape} for {out} filters; give it shape ({out},)")
    dtypes = [t.dtype.name for t in (x, weight, bias) if t is not None]
    if len(set(dtypes)) > 1 or not x.dtype.is_floating_point:
        raise TypeError(f"{name}: dtypes {', '.join(dtypes)}; give floats of one dtype, with to()")


def pair(value: Pair) -> tuple[int, int]:
    """Expand one or two numbers into a pair for height and width."""
    both = tuple(value) if isinstance(value, Iterable) else (value, value)
    if len(both) != 2:
        raise ValueError(f"{value} for height and width: give one number or two")
    return both


def _sides(
    name: str,
    x: Tensor,
    padding: Pair | str,
    kernel: Sequence[int],
    steps: tuple[int, int],
    spread: tuple[int, int],
) -> Sides:
    """Return the padding for each dimension of the input, and check that a window fits."""
    reach = [d * (k - 1) for k, d in zip(kernel, spread, strict=True)]
    if isinstance(padding, str):
        if padding not in ("same", "valid") or (padding == "same" and steps != (1, 1)):
            raise ValueError(
                f"{name}: padding {padding!r} with stride {steps}: give numbers, 'valid', or "
                "'same' with stride 1"
            )
        sides = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
    else:
        sides = [(p, p) for p in pair(padding)]
    if x.ndim != 4 or min(*steps, *spread, *kernel, 1) < 1:
        raise ValueError(
            f"{name}: windows of {tuple(kernel)}, stride {steps}, in shape {x.shape}: all must be "
            "positive, and the input (batch, channels, height, width)"
        )
    padded = tuple(n + sum(s) for n, s in zip(x.shape[2:], sides, strict=True))
    if any(n <= r for n, r in zip(padded, reach, strict=True)):
        shown = slice(1, None) if name.endswith("1d") else slice(None)  # a 1-D input has height one
        raise ValueError(
            f"{name}: no window of {tuple(kernel)[shown]} fits the padded input, {padded[shown]}"
        )
    return sides


def _padded(x: Tensor, sides: Sides, value: float) -> Tensor:
    return pad(x, (*sides[1], *sides[0]), value=value) if any(map(any, sides)) else x


def _on_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sides: Sides,
    steps: tuple[int, int],
    spread: tuple[int, int],
    groups: int,
) -> Tensor:
    """Join shifted slices as columns (im2col) and compute one matrix product per group."""
    (out, part), kernel = weight.shape[:2], weight.shape[2:]
    padded = _padded(x, sides, 0.0).permute(0, 2, 3, 1)
    windows = _windows(padded, kernel, steps, spread, (1, 2))
    rows = weight.permute(0, 2, 3, 1).reshape(out, -1)  # (out, window x channels)
    parts = []
    for g in range(groups):
        own = slice(g * part, (g + 1) * part)
        columns = _core.concat([w[..., own] if groups > 1 else w for w in windows], -1)
        filters = rows[g * out // groups : (g + 1) * out // groups] if groups > 1 else rows
        parts.append(_core.linear(columns, filters, bias if groups == 1 else None))
    y = parts[0] if groups == 1 else _core.concat(parts, -1)
    if groups > 1 and bias is not None:
        y = y + bias
    return y.permute(0, 3, 1, 2)


def _windows(
    x: Tensor,
    kernel: Sequence[int],
    steps: tuple[int, int],
    spread: tuple[int, int],
    dims: tuple[int, int],
) -> list[Tensor]:
    """Return one strided slice per kernel position (i, j), with that element of every window."""
    found = []
    for at in np.ndindex(*kernel):
        index = [slice(None)] * x.ndim
        for dim, i, k, step, d in zip(dims, at, kernel, steps, spread, strict=True):
            count = (x.shape[dim] - d * (k - 1) - 1) // step + 1
            index[dim] = slice(i * d, i * d + (count - 1) * step + 1, step)
        found.append(x[tuple(index)])
    return found
