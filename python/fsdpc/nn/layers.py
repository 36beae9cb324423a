"""The basic layers of models."""

from __future__ import annotations

import math
from typing import Any

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.nn import init
from fsdpc.nn.module import Module, Parameter


class Linear(Module):
    """Multiply rows by a weight and add a bias: y = x W^T + b.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimensions of x and y.
    bias : bool, default True
    std : float, optional
        Standard deviation of normal initial values; by default, values are uniform in
        +-1/sqrt(in_features), as in PyTorch.
    dtype : dtype, default float32

    Notes
    -----
    ``weight`` is (out_features, in_features), ``bias`` (out_features).

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> layer = nn.Linear(3, 2)
    >>> layer(fsdpc.ones(5, 3)).shape, layer.weight.shape, layer.bias.shape
    ((5, 2), (2, 3), (2,))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        std: float | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features: int = in_features
        self.out_features: int = out_features
        self.weight: Parameter = Parameter.empty((out_features, in_features), dtype)
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        if std is None:
            init.uniform_(self.weight, -bound, bound)
        else:
            init.normal_(self.weight, 0.0, std)
        self.register_parameter("bias", Parameter.empty((out_features,), dtype) if bias else None)
        if self.bias is not None:
            if std is None:
                init.uniform_(self.bias, -bound, bound)
            else:
                init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return _core.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Embedding(Module):
    """Look up rows of a table by index.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Shape of the table ``weight``.
    padding_idx : int, optional
        A row that is initialised with zeros and gets no gradient from lookups, so training does not
        change it. Negative indices count from the end.
    std : float, default 1
        Standard deviation of normal initial values.

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> table = nn.Embedding(10, 4)
    >>> table(tensor([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        std: float = 1.0,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        rows = int(num_embeddings)
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise ValueError(f"padding_idx {padding_idx} is none of {rows} rows")
        self.num_embeddings: int = num_embeddings
        self.embedding_dim: int = embedding_dim
        self.padding_idx: int | None = None if padding_idx is None else padding_idx % rows
        self.weight: Parameter = Parameter.empty((num_embeddings, embedding_dim), dtype)
        init.normal_(self.weight, 0.0, std)
        if self.padding_idx is not None:
            init.zero_row_(self.weight, self.padding_idx)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...), int32 or int64 -> (..., embedding_dim)."""
        return _core.embedding(ids, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class LayerNorm(Module):
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift (Ba et al.
    2016).

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.LayerNorm(2, eps=0.0)(tensor([[1.0, 3.0]])).tolist()
    [[-1.0, 1.0]]
    """

    def __init__(
        self, dim: int, eps: float = 1e-5, bias: bool = True, *, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight: Parameter = init.ones_(Parameter.empty((dim,), dtype))
        self.register_parameter(
            "bias", init.zeros_(Parameter.empty((dim,), dtype)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        return _core.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RMSNorm(Module):
    """Divide the last dimension by its root mean square, then scale (Zhang & Sennrich 2019).

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> nn.RMSNorm(2, eps=0.0)(tensor([[1.0, -1.0]])).tolist()
    [[1.0, -1.0]]
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight: Parameter = init.ones_(Parameter.empty((dim,), dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., dim) -> (..., dim)."""
        return _core.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Dropout(Module):
    """Zero elements with probability p while training and scale the others by 1/(1 - p).

    Examples
    --------
    >>> from fsdpc import nn, tensor
    >>> layer = nn.Dropout(0.5).eval()
    >>> layer(tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability must be in [0, 1), got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x (any shape) -> the same shape."""
        return _core.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"
