"""Attention and the encoder layer, with PyTorch's names, arguments and state.

Masks work as in PyTorch's modules: True in a bool mask excludes a key, unlike in
:func:`fsdpc.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fsdpc import _core
from fsdpc import functional as F
from fsdpc._core import Tensor
from fsdpc.nn import init
from fsdpc.nn.layers import Dropout, LayerNorm, Linear
from fsdpc.nn.module import Module, Parameter


class MultiheadAttention(Module):
    """Project queries, keys and values, attend per head, project back (Vaswani et al. 2017).

    Parameters
    ----------
    embed_dim, num_heads : int
        ``num_heads`` must divide ``embed_dim``.
    dropout : float
        Dropout probability of the attention weights during training.
    bias : bool
    batch_first : bool
        (batch, tokens, embed_dim) instead of (tokens, batch, embed_dim).
    dtype : dtype, default float32

    Notes
    -----
    ``in_proj_weight`` (3 embed_dim, embed_dim) contains the rows for queries, keys and values;
    ``in_proj_bias`` has shape (3 embed_dim); ``out_proj`` is a :class:`Linear`.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = fsdpc.randn(1, 5, 8)
    >>> y, weights = layer(x, x, x, need_weights=False)
    >>> y.shape
    (1, 5, 8)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"MultiheadAttention: {num_heads} heads of {embed_dim} elements")
        self.embed_dim: int = embed_dim
        self.num_heads: int = num_heads
        self.dropout: float = dropout
        self.batch_first = batch_first
        self.in_proj_weight: Parameter = init.xavier_uniform_(
            Parameter.empty((3 * embed_dim, embed_dim), dtype)
        )
        self.register_parameter(
            "in_proj_bias", init.zeros_(Parameter.empty((3 * embed_dim,), dtype)) if bias else None
        )
        self.out_proj: Linear = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        if bias:
            init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (tokens, batch, embed_dim); key and value may have a different number of tokens.

        ``key_padding_mask`` is (batch, key tokens). ``attn_mask`` is (tokens, key tokens), or per
        batch and head (batch * heads, tokens, key tokens). A bool mask excludes keys where it is
        True; a float mask is added to the scores. Returns the result, in query's shape, and the
        weights (batch, tokens, key tokens) averaged over heads, or None if they are not needed.
        Without weights, masks and dropout, the weights matrix is never stored.
        """
        q, k, v = self._projected(query, key, value)
        mask = self._mask(key_padding_mask, attn_mask, q.shape[0])
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights or dropout:
            weights = F.attention_weights(q, k, is_causal, mask=mask)
            dropped = F.dropout(weights, dropout) if dropout else weights
            y = dropped.to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal, mask=mask)
        y = self.out_proj(y.transpose(1, 2).reshape(q.shape[0], q.shape[2], self.embed_dim))
        y = y if self.batch_first else y.transpose(0, 1)
        return y, weights.mean(1).to(y.dtype) if need_weights and weights is not None else None

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        """Return queries, keys and values, each of shape (batch, heads, tokens, dim)."""
        n, parts = self.embed_dim, []
        same = all(x is inputs[0] for x in inputs)
        joined = _core.linear(inputs[0], self.in_proj_weight, self.in_proj_bias) if same else None
        for i, x in enumerate(inputs):
            rows = slice(i * n, (i + 1) * n)
            if joined is not None:
                y = joined[..., rows]
            else:
                bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
                y = _core.linear(x, self.in_proj_weight[rows], bias)
            y = y if self.batch_first else y.transpose(0, 1)
            y = y.reshape(*y.shape[:2], self.num_heads, n // self.num_heads)
            parts.append(y.transpose(1, 2))
        return parts

    def _mask(self, padding: Tensor | None, attn: Tensor | None, batch: int) -> Tensor | None:
        """Combine both masks into one, broadcastable to (batch, heads, tokens, key tokens)."""
        if padding is not None:
            padding = padding.reshape(padding.shape[0], 1, 1, padding.shape[1])
        if attn is not None and attn.ndim == 3:
            attn = attn.reshape(batch, self.num_heads, *attn.shape[1:])
        given = [m for m in (padding, attn) if m is not None]
        if all(m.dtype is _core.bool_ for m in given):
            seen = [F.logical_not(m) for m in given]
            return None if not seen else seen[0] if len(seen) == 1 else F.logical_and(*seen)
        added = [F.where(m, -math.inf, 0.0) if m.dtype is _core.bool_ else m for m in given]
        return added[0] if len(added) == 1 else added[0] + added[1]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}"


class TransformerEncoderLayer(Module):
    """Self-attention and two linear layers, each with a residual connection and normalisation.

    Parameters
    ----------
    d_model, nhead : int
    dim_feedforward : int
    dropout : float
    activation : {"relu", "gelu"} or callable
    layer_norm_eps : float
    batch_first : bool
        (batch, tokens, d_model) instead of (tokens, batch, d_model).
    norm_first : bool
        Normalise before, not after, attention and linear layers.
    bias : bool
    dtype : dtype, default float32

    Notes
    -----
    Modules are ``self_attn``, ``linear1``, ``linear2``, ``norm1`` and ``norm2``, as in PyTorch.

    Source: Vaswani et al. 2017; Xiong et al. 2020 (norm_first).

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> layer(fsdpc.randn(1, 5, 8)).shape
    (1, 5, 8)
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        known = {"relu": F.relu, "gelu": F.gelu}
        if not callable(activation) and activation not in known:
            raise ValueError(f"activation is 'relu', 'gelu' or a function, not {activation!r}")
        self.activation: Callable[[Tensor], Tensor] = known.get(activation, activation)
        self.norm_first = norm_first
        self.self_attn: MultiheadAttention = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first, dtype=dtype
        )
        self.linear1: Linear = Linear(d_model, dim_feedforward, bias, dtype=dtype)
        self.dropout: Dropout = Dropout(dropout)
        self.linear2: Linear = Linear(dim_feedforward, d_model, bias, dtype=dtype)
        self.norm1: LayerNorm = LayerNorm(d_model, layer_norm_eps, bias, dtype=dtype)
        self.norm2: LayerNorm = LayerNorm(d_model, layer_norm_eps, bias, dtype=dtype)
        self.dropout1: Dropout = Dropout(dropout)
        self.dropout2: Dropout = Dropout(dropout)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src (tokens, batch, d_model) -> the same shape; masks as in MultiheadAttention."""

        def attend(x: Tensor) -> Tensor:
            y, _ = self.self_attn(x, x, x, src_key_padding_mask, False, src_mask, is_causal)
            return self.dropout1(y)

        def feed(x: Tensor) -> Tensor:
            return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

        if self.norm_first:
            x = src + attend(self.norm1(src))
            return x + feed(self.norm2(x))
        x = self.norm1(src + attend(src))
        return self.norm2(x + feed(x))
