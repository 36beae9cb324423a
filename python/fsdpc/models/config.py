"""Sizes of models, by preset name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer.

    Parameters
    ----------
    vocab_size, dim, layers, heads, inner : int
        Words, hidden width, blocks, query heads, width inside the feed-forward block.
    kv_heads : int, optional
        Key and value heads (grouped queries); as many as query heads by default.
    max_seq : int, default 2048
        Longest sequence (a table of GPT-2; a bound for LLaMA).
    tied : bool, default False
        Whether the output layer is the embedding.
    rope_theta, norm_eps : float
        Base of the rotary frequencies; epsilon of the norms.
    no_rope_every : int, default 0
        Every n-th block of a LLaMA knows no positions, as in SmolLM3; 0: all of them do.
    dropout : float, default 0
        Of GPT-2's residual branches and embeddings.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    inner: int
    kv_heads: int | None = None
    max_seq: int = 2048
    tied: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    no_rope_every: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("vocab_size", "dim", "layers", "heads", "inner", "kv_heads", "max_seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.no_rope_every < 0:
            raise ValueError(f"no_rope_every must be at least 0, got {self.no_rope_every}")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"dim {self.dim} must divide by heads {self.heads} into an even head size"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must divide by kv_heads {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.dim // self.heads

    def with_(self, **changes: object) -> ModelConfig:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def matmul_parameters(self) -> int:
        """Parameters that take part in matrix products, a tied head included."""
        kv = self.kv_heads * self.head_dim
        block = self.dim * (2 * self.dim + 2 * kv) + 3 * self.dim * self.inner
        return self.layers * block + self.vocab_size * self.dim

    def flops_per_token(self, seq: int) -> float:
        """Return the training FLOPs of one token in a causal sequence of ``seq``.

        6 x (matmul parameters, a tied head included) + attention 6 L d s: forward and backward, the
        causal half of the attention matrix counted.
        """
        return 6.0 * self.matmul_parameters() + 6.0 * self.layers * self.dim * seq


#: Of transformers' LlamaConfig and SmolLM3Config.
_THEIRS = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "intermediate_size": "inner",
    "max_position_embeddings": "max_seq", "tie_word_embeddings": "tied",
    "no_rope_layer_interval": "no_rope_every",
}  # fmt: skip


def of_transformers(found: Mapping[str, Any]) -> ModelConfig:
    """Return the shape of a LLaMA-like model by the fields of transformers' configuration.

    Raises
    ------
    ValueError
        Its heads do not make up its width, or a size is out of range.
    TypeError
        A field that a model needs is not there.
    """
    head = found.get("head_dim")
    if head and head * found.get("num_attention_heads", 1) != found["hidden_size"]:
        raise ValueError(f"heads of {head} do not make up a width of {found['hidden_size']}")
    own = {ours: found[name] for name, ours in _THEIRS.items() if found.get(name) is not None}
    return ModelConfig(**own)


PRESETS: dict[str, ModelConfig] = {
    "2M": ModelConfig(vocab_size=256, dim=192, layers=4, heads=4, inner=512),
    "10M": ModelConfig(vocab_size=256, dim=320, layers=8, heads=5, inner=864),
    "41M": ModelConfig(vocab_size=8192, dim=768, layers=4, heads=12, inner=2048),
    "125M": ModelConfig(vocab_size=32000, dim=768, layers=12, heads=12, inner=2048, tied=True),
    "1B": ModelConfig(vocab_size=32000, dim=2048, layers=22, heads=32, inner=5632, kv_heads=4),
    "7B": ModelConfig(vocab_size=32000, dim=4096, layers=32, heads=32, inner=11008, max_seq=4096),
    "70B": ModelConfig(
        vocab_size=32000, dim=8192, layers=80, heads=64, inner=28672, kv_heads=8, max_seq=4096
    ),
    "SmolLM3-3B": ModelConfig(
        vocab_size=128256,
        dim=2048,
        layers=36,
        heads=16,
        inner=11008,
        kv_heads=4,
        max_seq=65536,
        tied=True,
        rope_theta=5e6,
        no_rope_every=4,
    ),
}


def preset(name: str) -> ModelConfig:
    """Return a preset by name.

    Raises
    ------
    KeyError
        No such preset; the message lists them.
    """
    if name not in PRESETS:
        raise KeyError(f"no preset '{name}'; there are {', '.join(PRESETS)}")
    return PRESETS[name]
