"""Convolutions and pooling as modules."""

from __future__ import annotations

import math
from typing import Any

from fsdpc import functional as F
from fsdpc._core import Tensor
from fsdpc.functional.convolution import Pair, pair
from fsdpc.nn import init
from fsdpc.nn.module import Module, Parameter


class _Conv(Module):
    def __init__(self, shape: tuple[int, ...], groups: int, bias: bool, dtype: Any) -> None:
        super().__init__()
        if groups < 1 or shape[0] % groups or shape[1] % groups:
            raise ValueError(
                f"{shape[1]} channels to {shape[0]} in {groups} groups: make it divide"
            )
        shape = (shape[0], shape[1] // groups, *shape[2:])
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self.weight: Parameter = init.uniform_(Parameter.empty(shape, dtype), -bound, bound)
        p = init.uniform_(Parameter.empty(shape[:1], dtype), -bound, bound) if bias else None
        self.register_parameter("bias", p)
        self.groups = groups

    def extra_repr(self) -> str:
        return f"weight={self.weight.shape}, groups={self.groups}, bias={self.bias is not None}"


class Conv2d(_Conv):
    """Convolve images; see :func:`fsdpc.functional.conv2d`.

    Parameters
    ----------
    in_channels, out_channels : int
    kernel_size, stride, padding, dilation : int or two ints
        ``padding`` may be "same" or "valid".
    groups : int
    bias : bool
    dtype : dtype, default float32

    Notes
    -----
    ``weight`` is (out_channels, in_channels / groups, height, width), ``bias`` (out_channels).
    Both are initialised uniformly in +-1/sqrt(fan in), as in PyTorch.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.Conv2d(3, 8, 3, stride=2, padding=1)(fsdpc.ones(1, 3, 8, 8)).shape
    (1, 8, 4, 4)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        size = pair(kernel_size)
        super().__init__((out_channels, in_channels, *size), groups, bias, dtype)
        self.stride: Pair = stride
        self.padding: Pair | str = padding
        self.dilation: Pair = dilation

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, in_channels, height, width) -> (batch, out_channels, height, width)."""
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Conv1d(_Conv):
    """Convolve sequences; see :class:`Conv2d`.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.Conv1d(3, 8, 5, padding="same")(fsdpc.ones(1, 3, 10)).shape
    (1, 8, 10)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int | str = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__((out_channels, in_channels, kernel_size), groups, bias, dtype)
        self.stride: int = stride
        self.padding: int | str = padding
        self.dilation: int = dilation

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, in_channels, length) -> (batch, out_channels, length)."""
        return F.conv1d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class _Pool(Module):
    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0) -> None:
        super().__init__()
        self.kernel_size: Any = kernel_size
        self.stride: Any = stride
        self.padding: Any = padding

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool1d(_Pool):
    """Take the maximum of each window; see :func:`fsdpc.functional.max_pool1d`.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.MaxPool1d(2)(tensor([[[1.0, 3.0, 5.0, 7.0]]])).tolist()
    [[[3.0, 7.0]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, length) -> (batch, channels, length)."""
        return F.max_pool1d(x, self.kernel_size, self.stride, self.padding)


class MaxPool2d(_Pool):
    """Take the maximum of each window; see :func:`fsdpc.functional.max_pool2d`.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.MaxPool2d(2)(fsdpc.ones(1, 3, 4, 4)).shape
    (1, 3, 2, 2)
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, height, width) -> (batch, channels, height, width)."""
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AvgPool1d(_Pool):
    """Average each window; see :func:`fsdpc.functional.avg_pool1d`.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.AvgPool1d(2)(tensor([[[1.0, 3.0, 5.0, 7.0]]])).tolist()
    [[[2.0, 6.0]]]
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, length) -> (batch, channels, length)."""
        return F.avg_pool1d(x, self.kernel_size, self.stride, self.padding)


class AvgPool2d(_Pool):
    """Average each window; see :func:`fsdpc.functional.avg_pool2d`.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.AvgPool2d(2)(fsdpc.ones(1, 3, 4, 4)).shape
    (1, 3, 2, 2)
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, channels, height, width) -> (batch, channels, height, width)."""
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)
