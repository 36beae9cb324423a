"""Model sizes, by preset name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdpc.models.rope import RopeScaling

#: Functions in feed-forward blocks, by transformers' name.
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder-only transformer.

    Parameters
    ----------
    vocab_size, dim, layers, heads, inner : int
        Vocabulary size, hidden width, blocks, query heads, width inside the feed-forward block.
    kv_heads : int, optional
        Key and value heads (grouped queries); by default the number of query heads.
    head_dim : int, optional
        Elements of one head; by default ``dim / heads``.
    max_seq : int, default 2048
        Longest sequence (GPT-2: size of its position table; LLaMA: a limit).
    tied : bool, default False
        Whether the output layer shares the embedding.
    rope_theta, norm_eps : float
        Base of the rotary frequencies; epsilon of LLaMA's norms.
    layer_norm_eps : float, default 1e-5
        Epsilon of GPT-2's norms.
    rope_scaling : RopeScaling, optional
        How to scale rotary frequencies for longer sequences.
    no_rope_every : int, default 0
        Every n-th block of a LLaMA has no positions, as in SmolLM3; 0 means that all blocks have
        them.
    no_rope_layers : tuple of int, optional
        Indices of the blocks without positions, instead of ``no_rope_every``.
    qkv_bias, out_bias, mlp_bias : bool, default False
        Whether LLaMA's query, key and value projections, its projection after attention, and its
        feed-forward block have biases. GPT-2 has all of them.
    qk_norm : bool, default False
        Whether RMSNorm is applied to each query and key head, as in Qwen3.
    sliding_window : int, optional
        Number of tokens visible to a query in a LLaMA, including its own; by default all up to its
        own.
    window_layers : tuple of int, optional
        Indices of the blocks with the window; by default all of them.
    activation : str, optional
        One of transformers' "silu" (LLaMA's default), "gelu", "gelu_new" (GPT-2's),
        "gelu_pytorch_tanh" and "relu".
    dropout : float, default 0
        Dropout in GPT-2's residual branches and embeddings.
    attention_dropout : float, default 0
        Dropout of attention weights. If above 0, training keeps the weights (B, heads, T, T).
    family : str, optional
        The model's ``model_type`` in transformers; by default derived from the shape.
    bos_token_id, eos_token_id, pad_token_id : int, optional
        Tokens that begin, end and pad sequences. Multiple end tokens form a tuple. In GPT-2, the
        padding token's embedding row gets no gradient from lookups, as in transformers.

    Examples
    --------
    >>> from fsdpc.models import ModelConfig
    >>> ModelConfig(vocab_size=256, dim=64, layers=2, heads=4, inner=128).kv_heads
    4
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    inner: int
    kv_heads: int | None = None
    head_dim: int | None = None
    max_seq: int = 2048
    tied: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-5
    rope_scaling: RopeScaling | None = None
    no_rope_every: int = 0
    no_rope_layers: tuple[int, ...] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[int, ...] | None = None
    activation: str | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    family: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("vocab_size", "dim", "layers", "heads", "inner", "kv_heads", "max_seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.no_rope_every < 0:
            raise ValueError(f"no_rope_every must be at least 0, got {self.no_rope_every}")
        if self.head_dim is None:
            if self.dim % self.heads or (self.dim // self.heads) % 2:
                raise ValueError(
                    f"dim {self.dim} must divide by heads {self.heads} into an even head size"
                )
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and at least 2, got {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must divide by kv_heads {self.kv_heads}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation '{self.activation}' is not known; there are {', '.join(ACTIVATIONS)}"
            )
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must be in [0, 1), got {self.attention_dropout}")

    def rotates(self, layer: int) -> bool:
        """Return whether the block with this index uses rotary positions."""
        if self.no_rope_layers is not None:
            return layer not in self.no_rope_layers
        return not self.no_rope_every or (layer + 1) % self.no_rope_every != 0

    def window_of(self, layer: int) -> int | None:
        """Return a block's window in tokens, or None if queries see all earlier tokens."""
        inside = self.window_layers is None or layer in self.window_layers
        return self.sliding_window if inside else None

    def with_(self, **changes: Any) -> ModelConfig:
        """Return a copy with changed fields; ``head_dim`` is updated if it was ``dim / heads``."""
        if {"dim", "heads"} & set(changes) and self.head_dim * self.heads == self.dim:
            changes.setdefault("head_dim", None)
        return replace(self, **changes)

    def matmul_parameters(self) -> int:
        """Number of parameters in matrix products, including a tied head."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        block = self.dim * (2 * q + 2 * kv) + 3 * self.dim * self.inner
        return self.layers * block + self.vocab_size * self.dim

    def flops_per_token(self, seq: int) -> float:
        """Return the training FLOPs per token in a causal sequence of ``seq`` tokens.

        6 x (matmul parameters, including a tied head) + attention 6 L d s, where d is the total
        size of all heads. The count covers forward and backward with only the causal half of the
        attention matrix, and ignores windows.
        """
        width = self.heads * self.head_dim
        return 6.0 * self.matmul_parameters() + 6.0 * self.layers * width * seq


#: Field names in transformers' LlamaConfig and SmolLM3Config.
_THEIRS = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "intermediate_size": "inner",
    "max_position_embeddings": "max_seq", "tie_word_embeddings": "tied",
    "no_rope_layer_interval": "no_rope_every", "head_dim": "head_dim",
}  # fmt: skip


def of_transformers(found: Mapping[str, Any]) -> ModelConfig:
    """Return a LLaMA-like model's configuration, given its transformers configuration.

    Raises
    ------
    ValueError
        A size is out of range.
    TypeError
        A required field is missing.
    """
    own = {ours: found[name] for name, ours in _THEIRS.items() if found.get(name) is not None}
    return ModelConfig(**own)


PRESETS: dict[str, ModelConfig] = {
    "2M": ModelConfig(vocab_size=256, dim=192, layers=4, heads=4, inner=512),
    "10M": ModelConfig(vocab_size=256, dim=320, layers=8, heads=5, inner=864),
    "41M": ModelConfig(vocab_size=8192, dim=768, layers=4, heads=12, inner=2048),
    "125M": ModelConfig(vocab_size=32000, dim=768, layers=12, heads=12, inner=2048, tied=True),
    "1B": ModelConfig(vocab_size=32000, dim=2048, layers=22, heads=32, inner=5632, kv_heads=4),
    "7B": ModelConfig(vocab_size=32000, dim=4096, layers=32, heads=32, inner=11008, max_seq=4096),
    "8B": ModelConfig(
        vocab_size=128256,
        dim=4096,
        layers=32,
        heads=32,
        inner=14336,
        kv_heads=8,
        max_seq=8192,
        rope_theta=5e5,
    ),
    "13B": ModelConfig(vocab_size=32000, dim=5120, layers=40, heads=40, inner=13824, max_seq=4096),
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
    """Return the preset with this name.

    Raises
    ------
    KeyError
        The preset does not exist; the message lists all presets.

    Examples
    --------
    >>> from fsdpc.models import preset
    >>> preset("2M").dim, preset("2M").layers
    (192, 4)
    """
    if name not in PRESETS:
        raise KeyError(f"no preset '{name}'; there are {', '.join(PRESETS)}")
    return PRESETS[name]
