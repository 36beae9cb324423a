"""Activation functions as modules, and modules that only change shapes."""

from __future__ import annotations

import math

from fsdpc import _core
from fsdpc import functional as F
from fsdpc._core import Tensor
from fsdpc.nn.module import Module


class Identity(Module):
    """Return the input; the constructor ignores its arguments.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.Identity(3)(tensor([1.0])).tolist()
    [1.0]
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> x."""
        return x


class ReLU(Module):
    """Return max(x, 0).

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.ReLU()(tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.relu(x)


class GELU(Module):
    """Multiply x by the standard normal CDF at x (Hendrycks & Gimpel 2016).

    Parameters
    ----------
    approximate : {"none", "tanh"}
        Use erf, or tanh as in GPT-2.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.GELU()(tensor([0.0])).tolist()
    [0.0]
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """Return x * sigmoid(x).

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.SiLU()(tensor([0.0])).tolist()
    [0.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.silu(x)


class Sigmoid(Module):
    """Return the sigmoid of x, 1 / (1 + e ** -x).

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.Sigmoid()(tensor([0.0])).tolist()
    [0.5]
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.sigmoid(x)


class Tanh(Module):
    """Return the hyperbolic tangent of x.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.Tanh()(tensor([0.0])).tolist()
    [0.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.tanh(x)


class Softmax(Module):
    """Divide the exponentials of the elements by their sum along a dimension.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.Softmax()(tensor([1.0, 1.0])).tolist()
    [0.5, 0.5]
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return F.softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Flatten(Module):
    """Flatten a range of dimensions into one, by default all except the first.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> nn.Flatten()(fsdpc.ones(2, 3, 4)).shape
    (2, 12)
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim: int = start_dim
        self.end_dim: int = end_dim

    def forward(self, x: Tensor) -> Tensor:
        """x (a, b, c, ...) -> (a, b * c * ...), the same memory."""
        first, last = self.start_dim % x.ndim, self.end_dim % x.ndim
        return x.reshape(
            *x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]
        )

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"
