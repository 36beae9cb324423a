"""Published models: folders of transformers read with the same logits, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint
from fsdpc.models import (
    GPT2,
    Llama,
    ModelConfig,
    RopeScaling,
    from_config,
    from_pretrained,
    load_pretrained,
    save_pretrained,
)
from fsdpc.models.published import read_config, written_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = np.arange(36, dtype=np.int64).reshape(2, 18) * 7 % 61
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32,
              "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True,
                         "rms_norm_eps": 1e-4}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0,
                                             "rope_theta": 5e5},
                         "hidden_act": "gelu", "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True,
                        "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_theta": 1e6}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 0, 1],
                            "use_sliding_window": True, "sliding_window": 6}),
    "gpt2": ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 1e-3}),
}  # fmt: skip


def theirs_of(case: str, folder: Path, pad: int | None = None, **options: Any) -> Any:
    """A model of transformers, written to a folder; biases and norms are not at 0 and 1."""
    kind, changes = CASES[case]
    changes = changes if pad is None else {**changes, "pad_token_id": pad}
    sizes = GPT2_SIZES if kind == "gpt2" else SIZES
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    model.save_pretrained(folder, **options)
    return model


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(WORDS)).logits.numpy()


def ours(model: Any) -> np.ndarray:
    with fsdpc.no_grad():
        return model.eval()(WORDS).numpy()


@pytest.mark.ranks(1, timeout=240)
def test_the_same_logits_both_ways(tmp_path: Path) -> None:
    """One process for all models: importing transformers takes longer than the rest."""
    for case in CASES:
        theirs = theirs_of(case, tmp_path / case)
        want = logits_of(theirs)
        model = from_pretrained(tmp_path / case)
        np.testing.assert_allclose(ours(model), want, atol=1e-5, rtol=1e-5, err_msg=case)
        saved = tmp_path / f"{case}-saved"
        save_pretrained(model, saved, max_shard_bytes=50_000)
        read, report = transformers.AutoModelForCausalLM.from_pretrained(
            saved, output_loading_info=True
        )
        keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
        assert not any(report[k] for k in keys), case
        assert type(read) is type(theirs) and read.config.eos_token_id == 2
        np.testing.assert_array_equal(logits_of(read), want, err_msg=case)
        if case in ("mistral", "gpt2"):  # through windows and unfused activations
            compare_gradients(theirs, model)
        compare_greedy_tokens(theirs, model, case)


def compare_gradients(theirs: Any, model: Any) -> None:
    words = torch.from_numpy(WORDS)
    theirs(words, labels=words).loss.backward()
    targets = np.concatenate([WORDS[:, 1:], np.full((2, 1), -100)], axis=1)
    model(WORDS, targets).backward()
    want = dict(theirs.named_parameters())
    for name, p in model.named_parameters():
        grad = want[name].grad.numpy()
        np.testing.assert_allclose(p.grad.numpy(), grad, atol=1e-5, rtol=1e-3, err_msg=name)


@pytest.mark.ranks([1, 2], timeout=300)
def test_lookups_do_not_train_the_padding(tmp_path: Path) -> None:
    """A tied head does; a GPT-2 has no padding, as in transformers."""
    for case in CASES:
        folder = tmp_path / f"{case}-{fsdpc.rank()}"
        theirs = theirs_of(case, folder, pad=7)
        fsdpc.barrier()
        model = from_pretrained(folder).eval()
        for block in model.blocks():
            fsdpc.fully_shard(block)
        fsdpc.fully_shard(model)
        words = torch.from_numpy(WORDS)
        loss = theirs(words, labels=words).loss
        loss.backward()
        targets = np.concatenate([WORDS[:, 1:], np.full((2, 1), -100)], axis=1)
        own = model(WORDS, targets)
        own.backward()
        np.testing.assert_allclose(own.item(), loss.item(), rtol=1e-5, err_msg=case)
        want = dict(theirs.named_parameters())
        for name, p in model.named_parameters():
            grad = want[name].grad.numpy()
            np.testing.assert_allclose(
                fsdpc.full_grad(p).numpy(), grad, atol=1e-5, rtol=1e-3, err_msg=f"{case} {name}"
            )
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        ours = fsdpc.clip_grad_norm_(model, 1.0)
        np.testing.assert_allclose(float(ours), norm.item(), rtol=1e-4, err_msg=case)
        embedding = want.get("model.embed_tokens.weight")
        if embedding is not None and not CASES[case][1].get("tie_word_embeddings"):
            assert not embedding.grad[7].any()


def test_a_padding_of_the_family() -> None:
    """A configuration without the key has transformers' default."""
    for kind in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
        sizes = {k: v for k, v in SIZES.items() if k != "pad_token_id"}
        sizes["vocab_size"] = 128256
        theirs = transformers.AutoConfig.for_model(kind, **sizes)
        sizes["model_type"] = kind
        assert read_config(sizes).pad_token_id == theirs.pad_token_id, kind
        assert read_config({**sizes, "pad_token_id": None}).pad_token_id is None


def compare_greedy_tokens(theirs: Any, model: Any, case: str) -> None:
    """Ours for all prompts at once, with a cache; theirs for one after the other."""
    theirs.generation_config.eos_token_id = None
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8], [9, 7, 9, 3, 2, 3]]
    found = model.generate(prompts, 14, stop=())
    for prompt, row in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        want = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=14,
            do_sample=False,
            pad_token_id=0,
        )
        assert row.tolist() == want[0].tolist(), case
    assert len({tuple(row[-14:]) for row in found}) > 1, "prompts do not matter"


@pytest.mark.ranks(2, timeout=300)
def test_rows_go_straight_into_shards(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    if fsdpc.rank() == 0:
        want = logits_of(theirs_of("qwen2", folder, max_shard_size="40KB"))
        assert (folder / "model.safetensors.index.json").is_file()
        np.save(tmp_path / "want.npy", want)
    fsdpc.barrier()
    with fsdpc.deferred_init():
        model = from_config(folder)
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    fsdpc._core.reset_peak_memory_stats()
    before = fsdpc._core.memory_stats()
    load_pretrained(model, folder)
    after, whole = fsdpc._core.memory_stats(), 4 * model.num_parameters()
    assert after["total_peak_bytes"] - before["total_bytes"] < whole / 4, "more than rows was held"
    want = np.load(tmp_path / "want.npy")
    np.testing.assert_allclose(ours(model), want, atol=1e-5, rtol=1e-5)
    own = sum(p.local.numel() for p in model.parameters())
    assert own < 0.7 * model.num_parameters()
    save_pretrained(model, tmp_path / "ours")
    if fsdpc.rank() == 0:
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        np.testing.assert_array_equal(logits_of(read), logits_of_folder(folder))


def logits_of_folder(folder: Path) -> np.ndarray:
    return logits_of(transformers.AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.ranks(1, timeout=300)
def test_dtypes(tmp_path: Path) -> None:
    theirs = theirs_of("qwen3", tmp_path / "theirs").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "half")
    for dtype, name in ((None, "float32"), ("auto", "bfloat16"), ("float16", "float16")):
        model = from_pretrained(tmp_path / "half", dtype=dtype)
        assert {p.dtype.name for p in model.parameters()} == {name}
    assert model(WORDS, WORDS).item() > 0
    tied = from_config({**CASES["qwen2"][1], **SIZES, "model_type": "qwen2"}, dtype="bfloat16")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    model = from_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "saved", dtype=fsdpc.bfloat16)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert read.dtype == torch.bfloat16
    np.testing.assert_array_equal(
        read.lm_head.weight.detach().float().numpy(), theirs.lm_head.weight.detach().float().numpy()
    )


LLAMA = {**SIZES, "model_type": "llama"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({**LLAMA, "model_type": "gemma2"}, "model_type 'gemma2' is not known .*; there are llama"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope scaling 'yarn' is not"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "scaling 'dynamic'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2}}, "needs high_freq_factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2, "beta": 1}}, "with beta"),
        ({**LLAMA, "attn_logit_softcapping": 50.0}, "the key 'attn_logit_softcapping' .50.0. may"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "the key 'quantization_config'"),
        ({**LLAMA, "hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not known"),
        ({"model_type": "llama", "vocab_size": 9}, "needs hidden_size, intermediate_size"),
        ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True,
          "layer_types": ["chunked_attention"] * 4}, "'layer_types'"),
        ({**GPT2_SIZES, "model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
         "the key 'scale_attn_by_inverse_layer_idx'"),
        ({**GPT2_SIZES, "model_type": "gpt2", "embd_pdrop": 0.2}, "'embd_pdrop' 0.2 differ"),
        ({**GPT2_SIZES, "model_type": "gpt2", "tie_word_embeddings": False}, "'tie_word_embedd"),
    ],
)  # fmt: skip
def test_what_changes_numbers_is_refused(content: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_config(content)


def test_what_is_off_is_not_refused() -> None:
    """Keys of published files that say nothing, and rope as transformers 4 wrote it."""
    quiet = {"use_mrope": False, "rope_interleaved": False, "transformers.js_config": {"a": 1},
             "is_llama_config": True, "_name_or_path": "x", "pretraining_tp": 1}  # fmt: skip
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = read_config({**LLAMA, **quiet, **old})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.ranks(1, timeout=300)
def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    theirs_of("qwen3", tmp_path / "qwen3")
    theirs_of("gpt2", tmp_path / "gpt2")
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        from_pretrained("some-org/some-model")
    with pytest.raises(RuntimeError, match="load_pretrained"), fsdpc.deferred_init():
        from_pretrained(tmp_path / "qwen3")
    model = from_config(tmp_path / "qwen3")
    with pytest.raises(ValueError, match="holds a gpt2, and the model is a Llama"):
        load_pretrained(model, tmp_path / "gpt2")
    other = Llama(model.config.with_(norm_eps=1e-3, rope_theta=9.0))
    with pytest.raises(ValueError, match=r"differ in rope_theta 1000000.0 and 9.0; norm_eps"):
        load_pretrained(other, tmp_path / "qwen3")
    wide = json.loads((tmp_path / "qwen3" / "config.json").read_text()) | {"intermediate_size": 96}
    (tmp_path / "qwen3" / "config.json").write_text(json.dumps(wide))
    with pytest.raises(checkpoint.CheckpointError, match="gate_proj"):
        from_pretrained(tmp_path / "qwen3")


@pytest.mark.ranks(1, timeout=300)
def test_shapes_that_transformers_has_not(tmp_path: Path) -> None:
    sizes = {"vocab_size": 9, "dim": 8, "layers": 2, "heads": 2, "inner": 8}
    odd = Llama(ModelConfig(**sizes, qk_norm=True, no_rope_every=2))
    with pytest.raises(ValueError, match="smollm3 of transformers cannot .*: qk_norm"):
        save_pretrained(odd, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()
    with pytest.raises(ValueError, match="models of fsdpc.models, got Linear"):
        save_pretrained(fsdpc.nn.Linear(2, 2), tmp_path / "odd")
    with pytest.raises(ValueError, match="heads of dim / heads"):
        GPT2(ModelConfig(**sizes, head_dim=6))
    for family, more in (("llama", {}), ("qwen2", {"qkv_bias": True}),
                         ("mistral", {"sliding_window": 3})):  # fmt: skip
        assert written_config(ModelConfig(**sizes, **more))["model_type"] == family


def test_dropout_of_attention_weights() -> None:
    """In training alone, and of the share that it says."""
    fsdpc.manual_seed(0)
    sizes = {"vocab_size": 9, "dim": 8, "layers": 1, "heads": 2, "inner": 8}
    model = Llama(ModelConfig(**sizes, attention_dropout=0.5))
    plain = Llama(ModelConfig(**sizes))
    plain.load_state_dict(model.state_dict())
    words = WORDS[:, :6] % 9
    a, b = (model.train()(words).numpy() for _ in range(2))
    assert (a != b).any()
    np.testing.assert_array_equal(model.eval()(words).numpy(), plain(words).numpy())
