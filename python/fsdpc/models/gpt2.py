"""GPT-2: learned positions, LayerNorm, GELU (Radford et al. 2019).

Parameters have the names and shapes of transformers' ``GPT2LMHeadModel``, so state dicts are
interchangeable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fsdpc import _core, nn
from fsdpc._core import Tensor
from fsdpc.models.attention import attend, positions_of
from fsdpc.models.cache import KeyValueCache
from fsdpc.models.config import ModelConfig
from fsdpc.models.decoding import LanguageModel
from fsdpc.models.llama import activate, as_ids, logits_or_loss

INIT_STD = 0.02


class Projection(nn.Module):
    """y = x W + b with W as in transformers' Conv1D.

    Parameters
    ----------
    in_features, out_features : int
        Shape of ``weight``, which is the transpose of a Linear's.
    std : float
        Standard deviation of the normal distribution for ``weight``; ``bias`` is initialised with
        0.
    """

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.init.normal_(
            nn.Parameter.empty((in_features, out_features)), 0.0, std
        )
        self.bias: nn.Parameter = nn.init.zeros_(nn.Parameter.empty((out_features,)))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        return _core.linear(x, self.weight, self.bias, "io")

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.weight.shape)


class Attention(nn.Module):
    """Causal self-attention, with queries, keys and values from one projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config: ModelConfig = config
        self.layer: int = layer
        self.c_attn: Projection = Projection(config.dim, 3 * config.dim, INIT_STD)
        self.c_proj: Projection = Projection(
            config.dim, config.dim, INIT_STD / math.sqrt(2 * config.layers)
        )
        self.dropout: nn.Dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        cache: KeyValueCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim)."""
        c = self.config
        batch, tokens, dim = x.shape
        qkv = self.c_attn(x)
        q, k, v = (
            qkv[:, :, i * dim : (i + 1) * dim].view(batch, tokens, c.heads, c.head_dim)
            for i in range(3)
        )
        if cache is None:
            dropout = c.attention_dropout if self.training else 0.0
            y = attend(q, k, v, None, dropout, lengths)
        else:
            y = cache.attend(self.layer, q, k, v, None)
        return self.dropout(self.c_proj(y.view(batch, tokens, dim)))


class Expansion(Projection):
    """gelu(x W + b), in its tanh form, as one operation; or another function of the product."""

    def __init__(self, in_features: int, out_features: int, std: float, activation: str) -> None:
        super().__init__(in_features, out_features, std)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, dim) -> (B, T, inner)."""
        if self.activation in ("gelu_new", "gelu_pytorch_tanh"):
            return _core.linear_gelu(x, self.weight, self.bias, "io")
        return activate(super().forward(x), self.activation)


class FeedForward(nn.Module):
    """proj(gelu(fc(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        activation = config.activation or "gelu_new"
        self.c_fc: Expansion = Expansion(config.dim, config.inner, INIT_STD, activation)
        self.c_proj: Projection = Projection(
            config.inner, config.dim, INIT_STD / math.sqrt(2 * config.layers)
        )
        self.dropout: nn.Dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, dim) -> (B, T, dim)."""
        return self.dropout(self.c_proj(self.c_fc(x)))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln_1: nn.LayerNorm = nn.LayerNorm(config.dim, config.layer_norm_eps)
        self.attn: Attention = Attention(config, layer)
        self.ln_2: nn.LayerNorm = nn.LayerNorm(config.dim, config.layer_norm_eps)
        self.mlp: FeedForward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        cache: KeyValueCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """x (B, T, dim) -> (B, T, dim)."""
        x = x + self.attn(self.ln_1(x), cache, lengths)
        return x + self.mlp(self.ln_2(x))


class TiedEmbedding(nn.Embedding):
    """An embedding table that is also the output layer."""

    def forward(  # type: ignore[override]
        self, x: Tensor, targets: Tensor | None = None, *, as_head: bool = False
    ) -> Tensor:
        """Return rows of the table or, if used as the head, logits or a loss. The module may be a
        separate unit."""
        return logits_or_loss(x, self.weight, targets) if as_head else super().forward(x)


class Transformer(nn.Module):
    """Embeddings, blocks and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte: TiedEmbedding = TiedEmbedding(config.vocab_size, config.dim, std=INIT_STD)
        self.wpe: nn.Embedding = nn.Embedding(config.max_seq, config.dim, std=INIT_STD)
        self.drop: nn.Dropout = nn.Dropout(config.dropout)
        self.h: nn.ModuleList = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.ln_f: nn.LayerNorm = nn.LayerNorm(config.dim, config.layer_norm_eps)


class GPT2(LanguageModel):
    """A GPT-2 language model, whose output layer shares the embedding table.

    Parameters
    ----------
    config : ModelConfig
        The model's sizes; ``inner`` is 4 x dim in published models.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc.models import GPT2, ModelConfig
    >>> model = GPT2(ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, inner=32, max_seq=8))
    >>> model(fsdpc.tensor([[1, 2, 3]])).shape
    (1, 3, 256)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.head_dim * config.heads != config.dim:
            raise ValueError(
                f"a GPT-2 has heads of dim / heads, got head_dim {config.head_dim} for "
                f"{config.dim} / {config.heads}"
            )
        self.config = config
        self.transformer: Transformer = Transformer(config)

    def blocks(self) -> list[nn.Module]:
        """Return the modules to shard as separate units."""
        return list(self.transformer.h)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return logits (B, T, vocab_size), or the mean loss if targets (B, T) are given.

        With a cache, which the call extends, it returns only the newest tokens' logits, of shape
        (B, 1, vocab_size). With document lengths, documents do not attend to each other, and
        positions restart in each.
        """
        ids = as_ids(ids, self.config)
        t = self.transformer
        if cache is not None and cache.begun:
            positions = cache.positions[:, None]
        elif lengths is not None:
            positions = positions_of(lengths, ids.shape)
        else:
            positions = np.arange(ids.shape[1], dtype=np.int64)
        x = t.drop(t.wte(ids) + t.wpe(_core.tensor(positions)))
        more = () if cache is None and lengths is None else (cache, lengths)
        for block in t.h:
            x = block(x, *more)
        return t.wte(t.ln_f(x if cache is None else cache.last(x)), targets, as_head=True)
