"""Functions as modules: activations, and what changes shapes alone."""

from __future__ import annotations

import math

from fsdpc import _core
from fsdpc import functional as F
from fsdpc._core import Tensor
from fsdpc.nn.module import Module


class Identity(Module):
    """Return the input, whatever arguments it was made with."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> x."""
        return x


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.relu(x)


class GELU(Module):
    """x times the normal distribution up to x (Hendrycks & Gimpel 2016).

    Parameters
    ----------
    approximate : {"none", "tanh"}
        By erf, or by tanh as GPT-2 has it.
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
    """x * sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.silu(x)


class Sigmoid(Module):
    """1 / (1 + e ** -x)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.tanh(x)


class Softmax(Module):
    """Exponentials divided by their sum along a dimension."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return F.softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Flatten(Module):
    """Join dimensions, all but the first by default."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        """x (a, b, c, ...) -> (a, b * c * ...), the same memory."""
        first, last = self.start_dim % x.ndim, self.end_dim % x.ndim
        return x.reshape(
            *x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]
        )

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"
