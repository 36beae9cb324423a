"""LLaMA: RMSNorm, rotary embedding, grouped queries, SwiGLU (Touvron et al. 2023).

Parameters have the names of transformers' ``LlamaForCausalLM``, so state dicts are interchangeable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fsdpc import _core, nn
from fsdpc._core import Tensor
from fsdpc.models.attention import attend
from fsdpc.models.cache import KeyValueCache
from fsdpc.models.config import ModelConfig
from fsdpc.models.decoding import LanguageModel
from fsdpc.models.rope import rope_frequencies

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention with grouped queries and optional rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config: ModelConfig = config
        self.layer: int = layer
        self.rotates: bool = config.rotates(layer)
        self.window: int | None = config.window_of(layer)
        dim, size, bias = config.dim, config.head_dim, config.qkv_bias
        width, kv = config.heads * size, config.kv_heads * size
        residual_std = INIT_STD / math.sqrt(2 * config.layers)
        self.q_proj: nn.Linear = nn.Linear(dim, width, bias=bias, std=INIT_STD)
        self.k_proj: nn.Linear = nn.Linear(dim, kv, bias=bias, std=INIT_STD)
        self.v_proj: nn.Linear = nn.Linear(dim, kv, bias=bias, std=INIT_STD)
        self.o_proj: nn.Linear = nn.Linear(width, dim, bias=config.out_bias, std=residual_std)
        if config.qk_norm:
            self.q_norm: nn.RMSNorm = nn.RMSNorm(size, config.norm_eps)
            self.k_norm: nn.RMSNorm = nn.RMSNorm(size, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KeyValueCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """x (B, T, dim), cos and sin (T, head_dim / 2) -> (B, T, dim)."""
        c = self.config
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, c.heads, c.head_dim)
        k = self.k_proj(x).view(batch, tokens, c.kv_heads, c.head_dim)
        v = self.v_proj(x).view(batch, tokens, c.kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            rotate = _core.rotary if cache is None else cache.rotate
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is None:
            dropout = c.attention_dropout if self.training else 0.0
            y = attend(q, k, v, self.window, dropout, lengths)
        else:
            y = cache.attend(self.layer, q, k, v, self.window)
        return self.o_proj(y.view(batch, tokens, c.heads * c.head_dim))


def activate(x: Tensor, name: str) -> Tensor:
    """Apply the activation function that transformers calls `name`."""
    if name == "relu":
        return _core.relu(x)
    if name == "silu":
        return _core.silu(x)
    return _core.gelu(x, "none" if name == "gelu" else "tanh")


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or another activation instead of silu."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        residual_std = INIT_STD / math.sqrt(2 * config.layers)
        dim, inner, bias = config.dim, config.inner, config.mlp_bias
        self.activation: str = config.activation or "silu"
        self.gate_proj: nn.Linear = nn.Linear(dim, inner, bias=bias, std=INIT_STD)
        self.up_proj: nn.Linear = nn.Linear(dim, inner, bias=bias, std=INIT_STD)
        self.down_proj: nn.Linear = nn.Linear(inner, dim, bias=bias, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, dim) -> (B, T, dim)."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.activation == "silu":
            return self.down_proj(_core.swiglu(gate, up))
        return self.down_proj(activate(gate, self.activation) * up)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn: Attention = Attention(config, layer)
        self.mlp: FeedForward = FeedForward(config)
        self.input_layernorm: nn.RMSNorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.post_attention_layernorm: nn.RMSNorm = nn.RMSNorm(config.dim, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KeyValueCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, lengths)
        return x + self.mlp(self.post_attention_layernorm(x))


def as_ids(ids: Tensor | np.ndarray, config: ModelConfig) -> Tensor:
    """Return ids (B, T) as a tensor; raise ValueError if T exceeds the model's limit."""
    ids = ids if isinstance(ids, Tensor) else _core.tensor(ids)
    if ids.shape[-1] > config.max_seq:
        raise ValueError(
            f"sequence of {ids.shape[-1]} tokens; the model was made for {config.max_seq}"
        )
    return ids


def logits_or_loss(x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
    """x (B, T, dim), weight (V, dim) -> logits (B, T, V), or the mean loss for targets (B, T)."""
    if targets is None:
        return _core.linear(x, weight)
    targets = _core.tensor(targets) if not isinstance(targets, Tensor) else targets
    rows = x.shape[0] * x.shape[1]
    return _core.linear_cross_entropy(x.view(rows, x.shape[2]), weight, targets.view(rows))


class Head(nn.Linear):
    """The output layer, whose loss keeps only one chunk of logits at a time."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits or the mean loss; computed here, as the layer may be a separate unit."""
        return logits_or_loss(x, self.weight, targets)


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding = nn.Embedding(
            config.vocab_size, config.dim, config.pad_token_id, std=INIT_STD
        )
        self.layers: nn.ModuleList = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm: nn.RMSNorm = nn.RMSNorm(config.dim, config.norm_eps)


class Llama(LanguageModel):
    """A LLaMA language model.

    Parameters
    ----------
    config : ModelConfig
        The model's sizes; see :func:`fsdpc.models.preset`.

    Examples
    --------
    >>> import fsdpc, numpy as np
    >>> from fsdpc.models import Llama, preset
    >>> fsdpc.manual_seed(0)
    >>> model = Llama(preset("2M"))
    >>> ids = np.zeros((1, 8), dtype=np.int64)
    >>> model(ids).shape
    (1, 8, 256)
    >>> bool(5 < float(model(ids, ids)) < 6)  # about ln 256
    True
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model: Decoder = Decoder(config)
        self.lm_head: Head = Head(config.dim, config.vocab_size, bias=False, std=INIT_STD)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.__dict__["_rope"] = {}

    def blocks(self) -> list[nn.Module]:
        """Return the modules to shard as separate units."""
        return list(self.model.layers)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return logits, or the mean loss if targets are given.

        Parameters
        ----------
        ids : Tensor or ndarray of int32 or int64, (B, T)
        targets : the same, optional
            Next tokens; -100 is ignored.
        cache : KeyValueCache, optional
            Cache of earlier tokens, which the call extends; used by :meth:`generate`.
        lengths : sequence of int, optional
            Number of tokens in each document packed in `ids`, sequence by sequence, so that
            documents do not attend to each other; see :func:`fsdpc.data.document_lengths`. Not with
            a cache.

        Returns
        -------
        Tensor
            Logits (B, T, vocab_size) in the compute dtype, or a 0-d float32 loss in nats. With a
            cache, logits (B, 1, vocab_size) of the newest tokens.
        """
        ids = as_ids(ids, self.config)
        if cache is not None and cache.begun:
            cos, sin = self._rotary_rows(cache.positions)
        else:
            cos, sin = self._rotary_tables(ids.shape[1])
        x = self.model.embed_tokens(ids)
        more = () if cache is None and lengths is None else (cache, lengths)
        for block in self.model.layers:
            x = block(x, cos, sin, *more)
        return self.lm_head(self.model.norm(x if cache is None else cache.last(x)), targets)

    def _rotary_tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        tables = self._rope.get(tokens)
        if tables is None:
            tables = self._rotary_rows(np.arange(tokens))
            self._rope[tokens] = tables
        return tables

    def _rotary_rows(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        c = self.config
        frequency = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        angle = np.outer(positions.astype(np.float32), frequency)
        return _core.tensor(np.cos(angle)), _core.tensor(np.sin(angle))
