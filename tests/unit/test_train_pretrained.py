"""``fsdpc train --init-from`` and ``--export``: from a folder of transformers to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tokens import TEXT, need_tokenizers, write_tokenizer

import fsdpc
from fsdpc.cli.train import make_model
from fsdpc.cli.train_options import check, parser
from fsdpc.cli.train_tokens import make_source
from fsdpc.models import GPT2, Llama, ModelConfig, from_pretrained, save_pretrained

SIZES = {"vocab_size": 300, "dim": 32, "layers": 2, "heads": 2, "inner": 48, "max_seq": 64}
SMALL = ["--batch", "2", "--seq", "16", "--steps", "2", "--dtype", "fp32",
         "--eval-bytes", "64", "--data", str(Path(__file__).parents[2] / "docs")]  # fmt: skip


def train(*options: object) -> str:
    words = [sys.executable, "-m", "fsdpc", "train", *SMALL, *map(str, options)]
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "FSDPC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(of_a_rank)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks(1, timeout=240)
def test_from_a_folder_to_another(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    gguf = pytest.importorskip("gguf")
    fsdpc.manual_seed(5)
    begin = Llama(ModelConfig(**SIZES, qk_norm=True, tied=True, eos_token_id=7))
    save_pretrained(begin, tmp_path / "begin")
    (tmp_path / "begin" / "generation_config.json").write_text('{"eos_token_id": 7}')
    text = train("--ranks", 2, "--init-from", tmp_path / "begin", "--export", tmp_path / "end",
                 "--sample", 5, "--lr", "1e-3")  # fmt: skip
    assert f"llama of {tmp_path / 'begin'}: " in text and f"exported to {tmp_path / 'end'}" in text
    assert "---- sample ----" in text
    end = from_pretrained(tmp_path / "end")
    state = begin.state_dict()
    moved = [np.abs(p.numpy() - state[name].numpy()).max() for name, p in end.named_parameters()]
    assert 0 < max(moved) < 4e-3, "two steps of 1e-3 from where it began"
    assert end.config.eos_token_id == 7
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert type(read).__name__ == "Qwen3ForCausalLM" and read.generation_config.eos_token_id == 7
    words = np.arange(12).reshape(2, 6)
    with torch.no_grad(), fsdpc.no_grad():
        want = read.eval()(torch.from_numpy(words)).logits.numpy()
        np.testing.assert_allclose(end(words).numpy(), want, atol=1e-5)
    again = train("--init-from", tmp_path / "end", "--steps", 0, "--sample", 0,
                  "--export", tmp_path / "end.gguf")  # fmt: skip
    assert "llama of" in again and f"exported to {tmp_path / 'end.gguf'}" in again
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "end.gguf").tensors}
    embedding = end.model.embed_tokens.weight.numpy()
    np.testing.assert_array_equal(tensors["token_embd.weight"], embedding)


def checked(*words: object) -> Any:
    options = parser().parse_args([*SMALL, *map(str, words)])
    check(options)
    return options


@pytest.mark.ranks(1, timeout=300)
def test_what_contradicts_the_folder(tmp_path: Path) -> None:
    llama = tmp_path / "llama"
    save_pretrained(Llama(ModelConfig(**SIZES)), llama)
    save_pretrained(GPT2(ModelConfig(**SIZES)), tmp_path / "gpt2")
    save_pretrained(Llama(ModelConfig(**{**SIZES, "vocab_size": 99})), tmp_path / "few")
    for words, text in (
        (("--preset", "2M"), "--preset 2M, and --init-from .* leave --preset out"),
        (("--model", "gpt2"), "--model gpt2, and --init-from .* holds a llama"),
        (("--seq", 65), "--seq 65, and the model .* at most 64"),
        (("--export", llama), "--export .* is there already"),
    ):
        with pytest.raises((ValueError, FileExistsError), match=text):
            checked("--init-from", llama, *words)
    with pytest.raises(ValueError, match="has a vocabulary of 99, and the data are bytes"):
        checked("--init-from", tmp_path / "few")
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        checked("--init-from", tmp_path / "none")
    assert checked("--init-from", tmp_path / "gpt2").model == "gpt2"
    assert checked("--init-from", llama, "--model", "llama").preset is None
    plain = checked()
    assert (plain.model, plain.preset) == ("llama", "2M")
    config = json.loads((llama / "config.json").read_text()) | {"model_type": "bert"}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type 'bert' is not known"):
        checked("--init-from", llama)


@pytest.mark.ranks(1, timeout=300)
def test_a_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    need_tokenizers()
    folder, text = tmp_path / "llama", tmp_path / "text.txt"
    save_pretrained(Llama(ModelConfig(**SIZES)), folder)
    write_tokenizer(folder / "tokenizer.json")
    text.write_text(TEXT * 20)
    options = checked("--init-from", folder, "--data", text)
    assert options.tokenizer == folder / "tokenizer.json"
    assert make_source(options).unit == "token"
    assert make_model(options).config.vocab_size == SIZES["vocab_size"]
    save_pretrained(Llama(ModelConfig(**{**SIZES, "vocab_size": 9})), tmp_path / "few")
    write_tokenizer(tmp_path / "few" / "tokenizer.json")
    with pytest.raises(ValueError, match="has a vocabulary of 9, and the tokenizer"):
        make_model(checked("--init-from", tmp_path / "few", "--data", text))
