"""GGUF files: read back by gguf's own reader and by transformers, against the model itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tokens import TEXT, need_tokenizers, write_tokenizer

import fsdpc
from fsdpc import distributed, nn
from fsdpc.cli.train_options import check, parser
from fsdpc.models import GPT2, Llama, ModelConfig, RopeScaling, from_config, save_pretrained

gguf = pytest.importorskip("gguf")

SIZES = {"vocab_size": 61, "dim": 64, "layers": 4, "heads": 4, "inner": 96, "max_seq": 48}
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_seq=32)
LINEAR = RopeScaling(kind="linear", factor=4.0)
CASES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
              "rope_scaling": LLAMA3, "rope_theta": 5e5},
    "linear": {"head_dim": 32, "tied": True, "rope_scaling": LINEAR, "family": "mistral"},
    "qwen2": {"kv_heads": 2, "qkv_bias": True, "tied": True},
    "qwen3": {"kv_heads": 2, "qk_norm": True, "head_dim": 32},
    "smollm3": {"kv_heads": 2, "no_rope_every": 4},
    "gpt2": {"tied": True, "layer_norm_eps": 1e-3},
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "transformer.wte": "token_embd", "transformer.wpe":
    "position_embd", "transformer.ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip


def make(case: str, shard: bool = False, **changes: Any) -> Llama | GPT2:
    """A model whose biases and norms are not at 0 and 1."""
    fsdpc.manual_seed(7)
    kind = GPT2 if case == "gpt2" else Llama
    model = kind(ModelConfig(**{**SIZES, **CASES[case], **changes}))
    draw = np.random.default_rng(1)
    with fsdpc.no_grad():
        for p in model.parameters():
            noise = draw.normal(size=p.shape).astype(np.float32) * 0.15
            p.copy_(fsdpc.tensor(p.numpy() + noise))
    if shard:
        for block in model.blocks():
            fsdpc.fully_shard(block)
        fsdpc.fully_shard(model)
    return model


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata, and gguf's tensors by name."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {t.name: t for t in reader.tensors}


def expected(model: Any, case: str) -> dict[str, np.ndarray]:
    """Every tensor under its name in the file, with rows in llama.cpp's order."""
    c, found = model.config, {}
    for ours, value in model.state_dict().items():
        if ours == "lm_head.weight" and c.tied:
            continue
        parts, x = ours.split("."), value.numpy()
        block = next((f"blk.{part}." for part in parts if part.isdecimal()), "")
        stem = ours.rpartition(".")[0]
        short = ".".join(parts[3:-1]) if block else stem
        if case == "gpt2" and ".c_" in ours and x.ndim == 2:
            x = x.T
        if case not in ("qwen2", "qwen3") and short in ("self_attn.q_proj", "self_attn.k_proj"):
            half, out = c.head_dim // 2, np.empty_like(x)
            for row in range(len(x)):
                head, i = divmod(row, c.head_dim)
                out[head * c.head_dim + 2 * (i % half) + i // half] = x[row]
            x = out
        found[f"{block}{NAMES[short]}.{parts[-1]}"] = x
    return found


@pytest.mark.ranks([1, 2])
def test_float32_holds_every_tensor_exactly(tmp_path: Path) -> None:
    for case in CASES:
        model = make(case, shard=True)
        want = expected(model, case)
        save_pretrained(model, tmp_path / f"{case}.gguf", format="gguf")
        fields, tensors = read(tmp_path / f"{case}.gguf")
        frequencies = tensors.pop("rope_freqs.weight", None)
        assert (frequencies is not None) == (case == "llama")
        assert set(tensors) == set(want), case
        for name, t in tensors.items():
            assert tuple(reversed(t.shape.tolist())) == want[name].shape, name
            np.testing.assert_array_equal(t.data, want[name], err_msg=f"{case} {name}")
        arch = {"linear": "llama"}.get(case, case)
        told = {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
        assert told["general.architecture"] == arch and told["general.file_type"] == 0
        assert told["vocab_size"] == 61 and told["context_length"] == 48
        assert (told["embedding_length"], told["feed_forward_length"]) == (64, 96)
        assert (told["block_count"], told["attention.head_count"]) == (4, 4)
        assert told["tokenizer.ggml.model"] == "none"
        if case == "gpt2":
            np.testing.assert_allclose(told["attention.layer_norm_epsilon"], 1e-3, rtol=1e-6)
            continue
        c = model.config
        assert told["attention.head_count_kv"] == c.kv_heads
        assert told["rope.dimension_count"] == told["attention.key_length"] == c.head_dim
        assert told["rope.freq_base"] == c.rope_theta
        np.testing.assert_allclose(told["attention.layer_norm_rms_epsilon"], 1e-6, rtol=1e-6)
        assert told.get("rope.scaling.factor") == (4.0 if case == "linear" else None)
        if frequencies is not None:  # the slowest turn less than once in 32 tokens
            assert frequencies.data[0] == 1 and frequencies.data[-1] == pytest.approx(8)


@pytest.mark.ranks([1, 2])
def test_smaller_types_round_as_gguf_does(tmp_path: Path) -> None:
    kinds = gguf.GGMLQuantizationType
    for dtype, kind, file_type in (("float16", kinds.F16, 1), (fsdpc.bfloat16, kinds.BF16, 32),
                                   ("q8_0", kinds.Q8_0, 7)):  # fmt: skip
        model = make("llama", shard=True, inner=80)
        want = expected(model, "llama")
        save_pretrained(model, tmp_path / "a.gguf", format="gguf", dtype=dtype, overwrite=True)
        fields, tensors = read(tmp_path / "a.gguf")
        assert fields["general.file_type"] == file_type
        for name in want:
            t, own = tensors[name], kind
            if want[name].ndim == 1:
                own = kinds.F32
            elif kind == kinds.Q8_0 and name.endswith("ffn_down.weight"):
                own = kinds.F16  # rows of 80
            assert t.tensor_type == own, name
            got = gguf.quants.dequantize(t.data, own)
            coded = gguf.quants.quantize(np.ascontiguousarray(want[name]), own)
            np.testing.assert_array_equal(got, gguf.quants.dequantize(coded, own), err_msg=name)
            np.testing.assert_allclose(got, want[name], atol=0.02, rtol=2e-2, err_msg=name)
        distributed.barrier()


@pytest.mark.ranks(1)
def test_the_type_follows_the_parameters(tmp_path: Path) -> None:
    with fsdpc.deferred_init():
        model = Llama(ModelConfig(**SIZES))
    content = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 61,
               "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    save_pretrained(from_config(content, dtype="bfloat16"), tmp_path / "a.gguf", format="gguf")
    fields, tensors = read(tmp_path / "a.gguf")
    kinds = gguf.GGMLQuantizationType
    assert fields["general.file_type"] == 32
    assert tensors["output.weight"].tensor_type == kinds.BF16
    assert tensors["output_norm.weight"].tensor_type == kinds.F32
    with pytest.raises(ValueError, match="float32, float16, bfloat16, q8_0, got float64"):
        wide = from_config(content, dtype="float64")
        save_pretrained(wide, tmp_path / "b.gguf", format="gguf")
    with pytest.raises(RuntimeError, match="deferred"):
        save_pretrained(model, tmp_path / "b.gguf", format="gguf")
    assert os.listdir(tmp_path) == ["a.gguf"]


@pytest.mark.ranks(1, timeout=240)
def test_transformers_reads_the_same_logits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    words = np.arange(36, dtype=np.int64).reshape(2, 18) * 7 % 61
    # From GGUF, transformers reads no rope scaling, no biases of llama, no size of qwen3's heads
    # (128 then), few sizes of gpt2 and no smollm3.
    plain = {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "rope_scaling": None}
    sizes = {"vocab_size": 61, "n_embd": 64, "n_inner": 96, "n_layer": 4, "n_head": 4,
             "n_positions": 48, "layer_norm_epsilon": 1e-3}  # fmt: skip
    changed = {"llama": plain, "linear": {"rope_scaling": None}, "qwen2": {},
               "qwen3": {"head_dim": 128}, "gpt2": {}}  # fmt: skip
    for case, changes in changed.items():
        model = make(case, **changes)
        save_pretrained(model, tmp_path / f"{case}.gguf", format="gguf")
        config = {"config": transformers.GPT2Config(**sizes)} if case == "gpt2" else {}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=f"{case}.gguf", dtype=torch.float32, **config
        )
        with torch.no_grad(), fsdpc.no_grad():
            got = theirs.eval()(torch.from_numpy(words)).logits.numpy()
            want = model.eval()(words).numpy()
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5, err_msg=case)


@pytest.mark.ranks([1, 2])
def test_what_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    model = make("qwen2", shard=True)

    def refused(kind: Any, match: str, model: Any = model, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            save_pretrained(model, options.pop("path", file), **{"format": "gguf", **options})

    refused(ValueError, "format must be one of safetensors, gguf, got 'onnx'", format="onnx")
    refused(ValueError, "float32, float16, bfloat16, q8_0, got q4_k", dtype="q4_k")
    refused(ValueError, "models of fsdpc.models, got Linear", nn.Linear(2, 2))
    refused(ValueError, r"ends in \.gguf", path=tmp_path / "a.bin")
    refused(ValueError, "is for format='gguf'", format="safetensors", tokenizer="x")
    refused(ValueError, "no mistral with sliding_window 5", make("linear", sliding_window=5))
    refused(ValueError, "no llama with activation 'gelu'", make("llama", activation="gelu"))
    refused(ValueError, "blocks without positions", make("smollm3", no_rope_every=2))
    refused(ValueError, "no qwen3 with biases", make("qwen3", qkv_bias=True, out_bias=True))
    refused(ValueError, "rope scaling 'llama3'", make("qwen2", rope_scaling=LLAMA3))
    (tmp_path / "plain").write_text("a file")
    refused(OSError, "plain", path=tmp_path / "plain" / "a.gguf")  # no folder to write into
    refused(FileNotFoundError, "tokenizer.json", tokenizer=tmp_path)  # once the file is claimed
    distributed.barrier()
    assert os.listdir(tmp_path) == ["plain"]
    save_pretrained(model, file, format="gguf")
    refused(FileExistsError, "is there already: choose another name")
    save_pretrained(model, file, format="gguf", overwrite=True)
    distributed.barrier()
    if distributed.rank() == 0:
        file.write_text("a letter")
        (tmp_path / "d.gguf").mkdir()
    distributed.barrier()
    refused(FileExistsError, "is not a GGUF file", path=tmp_path / "d.gguf", overwrite=True)
    refused(FileExistsError, "is not a GGUF file", overwrite=True)
    distributed.barrier()
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "d.gguf", "plain"]


@pytest.mark.ranks(2)
def test_a_failed_write_raises_everywhere(tmp_path: Path, monkeypatch: Any) -> None:
    model = make("llama", shard=True)
    if distributed.rank() == 0:
        calls = []

        def full(self: Any, tensor: Any) -> None:
            calls.append(tensor)
            if len(calls) == 5:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(model, tmp_path / "a.gguf", format="gguf")
    distributed.barrier()
    assert not os.listdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install gguf"):
        save_pretrained(model, tmp_path / "a.gguf", format="gguf")


@pytest.mark.ranks(1)
def test_a_tokenizer_in_the_file(tmp_path: Path) -> None:
    lib = need_tokenizers()
    path = write_tokenizer(tmp_path / "tokenizer.json")
    model = make("llama", vocab_size=310)
    save_pretrained(model, tmp_path / "a.gguf", format="gguf", tokenizer=tmp_path)
    fields, _ = read(tmp_path / "a.gguf")
    told = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    made = lib.Tokenizer.from_file(str(path))
    assert (told["model"], told["pre"]) == ("gpt2", "gpt-2")
    assert (told["eos_token_id"], told["bos_token_id"], told["add_bos_token"]) == (0, 0, False)
    count = made.get_vocab_size()
    assert [made.token_to_id(token) for token in told["tokens"][:count]] == list(range(count))
    assert told["tokens"][count:] == [f"[PAD{i}]" for i in range(count, 310)]
    kinds = gguf.TokenType
    assert told["token_type"] == [kinds.CONTROL, *[kinds.NORMAL] * (count - 1),
                                  *[kinds.UNUSED] * (310 - count)]  # fmt: skip
    merged = lib.Tokenizer(lib.models.BPE(
        {token: i for i, token in enumerate(told["tokens"])},
        [tuple(merge.split(" ")) for merge in told["merges"]],
    ))  # fmt: skip
    merged.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert merged.encode(TEXT).ids == made.encode(TEXT).ids
    for match, changed in (
        ("splits text as", lib.pre_tokenizers.Whitespace()),
        ("splits text as", lib.pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ):
        made.pre_tokenizer = changed
        made.save(str(path))
        with pytest.raises(ValueError, match=match):
            save_pretrained(model, tmp_path / "b.gguf", format="gguf", tokenizer=path)
    write_tokenizer(path)
    with pytest.raises(ValueError, match="has 3.. tokens, and the model has 61"):
        save_pretrained(make("llama"), tmp_path / "b.gguf", format="gguf", tokenizer=path)


def test_train_checks_the_export_before_it_begins(tmp_path: Path) -> None:
    def checked(*words: object) -> None:
        small = ["--data", str(Path(__file__).parents[2] / "docs"), "--export"]
        check(parser().parse_args([*small, str(tmp_path / "a.gguf"), *map(str, words)]))

    checked()
    path = write_tokenizer(tmp_path / "tokenizer.json")
    checked("--tokenizer", path)
    path.write_text(path.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    with pytest.raises(ValueError, match="--export .*a.gguf: tokenizer .* splits text as"):
        checked("--tokenizer", path)
