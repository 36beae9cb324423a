"""A checkpoint's folder is one that transformers' from_pretrained reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint.convert import convert
from fsdpc.models import GPT2, Llama, ModelConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = np.arange(24, dtype=np.int64).reshape(2, 12)
SIZES = {"vocab_size": 61, "dim": 48, "layers": 4, "heads": 4, "inner": 80, "max_seq": 64}


def logits_of(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.from_numpy(WORDS)).logits.numpy()


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize(
    "options",
    [{"kv_heads": 2}, {"tied": True, "rope_theta": 5e5}, {"no_rope_every": 4, "norm_eps": 1e-5}],
    ids=["grouped", "tied", "smollm3"],
)
def test_a_llama_of_ours(options: dict[str, Any], tmp_path: Path) -> None:
    fsdpc.manual_seed(3)
    model = Llama(ModelConfig(**SIZES, **options))
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    checkpoint.save(tmp_path / "one", {"model": model})
    checkpoint.save(tmp_path / "many", {"model": model}, max_shard_bytes=50_000)
    with fsdpc.no_grad():
        ours = model(WORDS).numpy()
    for name in ("one", "many"):
        np.testing.assert_allclose(logits_of(tmp_path / name), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks([1, 2], timeout=300)
@pytest.mark.parametrize("inner", [48, 192])
def test_a_gpt2_of_ours(inner: int, tmp_path: Path) -> None:
    fsdpc.manual_seed(3)
    model = GPT2(ModelConfig(**{**SIZES, "inner": inner}, dropout=0.1))
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    rng = np.random.default_rng(fsdpc.rank())
    for p in model.parameters():  # biases begin as 0 and norms as 1, and would say nothing
        noise = rng.normal(0, 0.1, p.local.shape).astype(np.float32)
        p.local.copy_(fsdpc.tensor(p.local.numpy() + noise))
    checkpoint.save(tmp_path / "one", {"model": model})
    checkpoint.save(tmp_path / "many", {"model": model}, max_shard_bytes=50_000)
    content = json.loads((tmp_path / "one" / "config.json").read_text())
    assert content["tie_word_embeddings"] and content["resid_pdrop"] == 0.1
    with fsdpc.no_grad():
        ours = model.eval()(WORDS).numpy()
    for name in ("one", "many"):
        np.testing.assert_allclose(logits_of(tmp_path / name), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(1, timeout=300)
def test_what_was_converted(tmp_path: Path) -> None:
    """The config goes along."""
    fsdpc.manual_seed(3)
    model = GPT2(ModelConfig(**SIZES))
    checkpoint.save(tmp_path / "saved", {"model": model})
    convert(tmp_path / "saved", tmp_path / "full")
    with fsdpc.no_grad():
        ours = model(WORDS).numpy()
    np.testing.assert_allclose(logits_of(tmp_path / "full"), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, timeout=300)
def test_a_model_of_transformers(tmp_path: Path) -> None:
    from fsdpc.torch import fully_shard

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    checkpoint.save(tmp_path / "saved", {"model": model})
    content = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert content["architectures"] == ["GPT2LMHeadModel"] and content["n_embd"] == 32
    with torch.no_grad():
        ours = model(torch.from_numpy(WORDS)).logits.numpy()
    np.testing.assert_array_equal(logits_of(tmp_path / "saved"), ours)


@pytest.mark.ranks(1)
def test_other_models_have_no_config(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "saved", {"model": fsdpc.nn.Linear(2, 2)})
    assert not (tmp_path / "saved" / "config.json").exists()
