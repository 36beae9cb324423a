"""Sizes of the presets, what a configuration refuses, and generation."""

from __future__ import annotations

import numpy as np
import pytest

import fsdpc
from fsdpc.models import GPT2, PRESETS, Llama, ModelConfig, preset
from fsdpc.models.config import of_transformers

# Parameters: the small ones by hand, from 1B on those of the published models.
PARAMETERS = {
    "2M": 1_869_504,
    "10M": 10_081_600,
    "41M": 40_901_376,
    "125M": 109_529_856,
    "1B": 1_100_048_384,  # TinyLlama
    "7B": 6_738_415_616,  # LLaMA and LLaMA 2
    "8B": 8_030_261_248,  # LLaMA 3
    "13B": 13_015_864_320,  # LLaMA 2
    "70B": 68_976_648_192,  # LLaMA 2
    "SmolLM3-3B": 3_075_098_624,
}


def test_every_preset_has_its_size() -> None:
    assert set(PARAMETERS) == set(PRESETS)
    for name, wanted in PARAMETERS.items():
        with fsdpc.deferred_init():
            model = Llama(preset(name))
        assert model.num_parameters() == wanted, name
        assert all(p.is_deferred for p in model.parameters())


def test_gpt2_is_as_large_as_its_parts() -> None:
    config = preset("2M")
    d, inner = config.dim, config.inner
    block = 4 * d * d + 4 * d + 2 * d * inner + d + inner + 4 * d
    total = config.layers * block + (config.vocab_size + config.max_seq) * d + 2 * d
    assert GPT2(config).num_parameters() in (total, total + config.vocab_size * d)


def test_flops_by_hand() -> None:
    c = ModelConfig(vocab_size=10, dim=4, layers=3, heads=2, inner=8, kv_heads=1)
    matrices = 3 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8) + 10 * 4
    assert c.matmul_parameters() == matrices
    assert c.flops_per_token(16) == 6 * matrices + 6 * 3 * 4 * 16


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"heads": 3}, "dim 8 must divide by heads 3 into an even head size"),
        ({"kv_heads": 3}, "heads 2 must divide by kv_heads 3"),
        ({"no_rope_every": -1}, "no_rope_every must be at least 0, got -1"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, int], text: str) -> None:
    config = ModelConfig(vocab_size=10, dim=8, layers=1, heads=2, inner=8)
    with pytest.raises(ValueError, match=text):
        config.with_(**changes)


def test_heads_of_any_size() -> None:
    """Such as Qwen3's: for models, and for plans by transformers' configuration."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 9,
             "intermediate_size": 96}  # fmt: skip
    config = of_transformers({**sizes, "head_dim": 32, "num_key_value_heads": 2})
    assert config.head_dim == 32 and of_transformers(sizes).head_dim == 16
    attention = 64 * 4 * 32 * 2 + 64 * 2 * 32 * 2
    assert config.matmul_parameters() == 2 * (attention + 3 * 64 * 96) + 9 * 64
    weights = sum(p.numel() for p in Llama(config).parameters() if p.ndim == 2)
    assert weights == config.matmul_parameters() + 9 * 64
    assert config.with_(heads=8).head_dim == 32  # as it was given
    assert of_transformers(sizes).with_(heads=8).head_dim == 8  # as dim / heads


def test_names_that_are_none() -> None:
    with pytest.raises(KeyError, match="no preset '3M'; there are 2M, 10M"):
        preset("3M")


def test_sequences_longer_than_the_model() -> None:
    model = Llama(preset("2M").with_(max_seq=4))
    with pytest.raises(ValueError, match="sequence of 5 tokens; the model was made for 4"):
        model(np.zeros((1, 5), np.int64))
