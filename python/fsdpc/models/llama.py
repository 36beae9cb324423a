"""LLaMA: RMSNorm, rotary embedding, grouped queries, SwiGLU (Touvron et al. 2023).

Parameters carry the names of transformers' ``LlamaForCausalLM``, so state dicts go across as they
are.
"""

from __future__ import annotations

import math

import numpy as np

from fsdpc import _core, nn
from fsdpc._core import Tensor
from fsdpc.models.config import ModelConfig

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention with rotary positions (or none) and grouped queries."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.rotates = not config.no_rope_every or (layer + 1) % config.no_rope_every != 0
        dim, kv = config.dim, config.kv_heads * config.head_dim
        residual_std = INIT_STD / math.sqrt(2 * config.layers)
        self.q_proj = nn.Linear(dim, dim, bias=False, std=INIT_STD)
        self.k_proj = nn.Linear(dim, kv, bias=False, std=INIT_STD)
        self.v_proj = nn.Linear(dim, kv, bias=False, std=INIT_STD)
        self.o_proj = nn.Linear(dim, dim, bias=False, std=residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, dim), cos and sin (T, head_dim / 2) -> (B, T, dim)."""
        c = self.config
        batch, tokens, dim = x.shape
        q = self.q_proj(x).view(batch, tokens, c.heads, c.head_dim)
        k = self.k_proj(x).view(batch, tokens, c.kv_heads, c.head_dim)
        v = self.v_proj(x).view(batch, tokens, c.kv_heads, c.head_dim)
        if self.rotates:
            q, k = _core.rotary(q, cos, sin), _core.rotary(k, cos, sin)
        y = _core.scaled_dot_product_attention(q, k, v, causal=True, layout="bthd")
        return self.o_proj(y.view(batch, tokens, dim))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        residual_std = INIT_STD / math.sqrt(2 * config.layers)
        self.gate_proj = nn.Linear(config.dim, config.inner, bias=False, std=INIT_STD)
        self.up_proj = nn.Linear(config.dim, config.inner, bias=False, std=INIT_STD)
        self.down_proj = nn.Linear(config.inner, config.dim, bias=False, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, dim) -> (B, T, dim)."""
        return self.down_proj(_core.swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, dim) -> (B, T, dim)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def as_ids(ids: Tensor | np.ndarray, config: ModelConfig) -> Tensor:
    """Return ids (B, T) as a tensor; ValueError if they are longer than the model's sequences."""
    ids = ids if isinstance(ids, Tensor) else _core.tensor(ids)
    if ids.shape[-1] > config.max_seq:
        raise ValueError(
            f"sequence of {ids.shape[-1]} tokens; the model was made for {config.max_seq}"
        )
    return ids


def logits_or_loss(x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
    """x (B, T, dim), weight (V, dim) -> logits (B, T, V), or the mean loss of targets (B, T)."""
    if targets is None:
        return _core.linear(x, weight)
    targets = _core.tensor(targets) if not isinstance(targets, Tensor) else targets
    rows = x.shape[0] * x.shape[1]
    return _core.linear_cross_entropy(x.view(rows, x.shape[2]), weight, targets.view(rows))


class Head(nn.Linear):
    """The output layer; its loss keeps one chunk of logits at a time."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or the mean loss; here, as the layer may be a unit of its own."""
        return logits_or_loss(x, self.weight, targets)


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim, std=INIT_STD)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)


class Llama(nn.Module):
    """A LLaMA language model.

    Parameters
    ----------
    config : ModelConfig
        Sizes; see :func:`fsdpc.models.preset`.

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
        self.model = Decoder(config)
        self.lm_head = Head(config.dim, config.vocab_size, bias=False, std=INIT_STD)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.__dict__["_rope"] = {}

    def blocks(self) -> list[nn.Module]:
        """Return the modules to shard as units of their own."""
        return list(self.model.layers)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or the mean loss where targets are given.

        Parameters
        ----------
        ids : Tensor or ndarray of int32 or int64, (B, T)
        targets : the same, optional
            Next words; -100 is left out.

        Returns
        -------
        Tensor
            Logits (B, T, vocab_size) in the compute dtype, or a 0-d float32 loss in nats.
        """
        ids = as_ids(ids, self.config)
        cos, sin = self._rotary_tables(ids.shape[1])
        x = self.model.embed_tokens(ids)
        for block in self.model.layers:
            x = block(x, cos, sin)
        return self.lm_head(self.model.norm(x), targets)

    def _rotary_tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        tables = self._rope.get(tokens)
        if tables is None:
            half = self.config.head_dim // 2
            frequency = 1.0 / self.config.rope_theta ** (
                np.arange(0, half, dtype=np.float32) * np.float32(2) / np.float32(2 * half)
            )
            angle = np.outer(np.arange(tokens, dtype=np.float32), frequency.astype(np.float32))
            tables = (_core.tensor(np.cos(angle)), _core.tensor(np.sin(angle)))
            self._rope[tokens] = tables
        return tables
