"""``fsdpc generate``: bytes of a run, tokens and chat of a folder, what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fsdpc
from fsdpc.cli import generate as generate_command
from fsdpc.cli.text_codec import ByteText, TokenText, render_chat
from fsdpc.models import Llama, ModelConfig, save_pretrained

SIZES = {"vocab_size": 320, "dim": 32, "layers": 2, "heads": 2, "inner": 48, "max_seq": 200}
TEXT = "Grüße, 世界! 🙂 def main(): return 1"
SPEED = r"\d+ tokens of prompt in [\d.]+ s, \d+ new ones in [\d.]+ s, [\d,.]+ tokens/s\n"


def save(folder: Path, **changes: Any) -> Path:
    fsdpc.manual_seed(2)
    save_pretrained(Llama(ModelConfig(**{**SIZES, **changes})), folder)
    return folder


def add_tokenizer(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer without merges, with a token that begins texts."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|user|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def environment() -> dict[str, str]:
    """For a command of its own, whatever rank this is."""
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "FSDPC_")
    own = {k: v for k, v in os.environ.items() if not k.startswith(of_a_rank)}
    return {**own, "PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}


def generate(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = generate_command.main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def test_bytes_of_a_run(tmp_path: Path) -> None:
    """As people run it: train, then generate from the newest checkpoint."""
    def command(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fsdpc", *map(str, words)], capture_output=True, text=True,
            timeout=300, env=environment(), input="de",
        )  # fmt: skip

    data = Path(__file__).parents[2] / "docs"
    done = command("train", "--steps", 1, "--batch", 1, "--seq", 16, "--sample", 0, "--data", data,
                   "--eval-bytes", 0, "--checkpoint", tmp_path / "run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [command("generate", tmp_path / "run", prompt, "--max-new-tokens", 20, "--seed", 4)
             for prompt in ("de", "-")]  # fmt: skip
    assert found[0].returncode == 0, found[0].stderr
    assert found[0].stdout == found[1].stdout and len(found[0].stdout) > 1
    assert re.fullmatch(SPEED, found[0].stderr) and found[0].stderr.startswith("2 tokens of")
    step = tmp_path / "run" / "step-00000001"
    alone = command("generate", step, "de", "--max-new-tokens", 20, "--seed", 4)
    assert alone.stdout == found[0].stdout


@pytest.mark.ranks(1)
def test_tokens_of_a_run(tmp_path: Path) -> None:
    """Its tokenizer is kept beside the checkpoints, and in what was exported."""
    made = add_tokenizer(tmp_path) / "tokenizer.json"
    data = Path(__file__).parents[2] / "docs" / "tour.md"
    done = subprocess.run(
        [sys.executable, "-m", "fsdpc", "train", "--steps", "1", "--batch", "1", "--seq", "16",
         "--sample", "0", "--data", str(data), "--eval-bytes", "0", "--tokenizer", str(made),
         "--checkpoint", str(tmp_path / "run"), "--export", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=300,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    few = ("--max-new-tokens", 4)
    for folder in (tmp_path / "run", tmp_path / "out"):
        assert (folder / "tokenizer.json").read_bytes() == made.read_bytes()
        code, _, speed = generate(folder, "Hi", *few)
        assert code == 0 and speed.startswith("3 tokens of prompt"), speed
    (tmp_path / "run" / "tokenizer.json").unlink()
    error = generate(tmp_path / "run", "Hi", *few)[2]
    assert "was trained with the tokenizer" in error and "--tokenizer" in error
    assert generate(tmp_path / "run", "Hi", *few, "--tokenizer", made)[0] == 0
    (tmp_path / "other.json").write_text(made.read_text() + " ")
    error = generate(tmp_path / "run", "Hi", *few, "--tokenizer", tmp_path / "other.json")[2]
    assert "is not the tokenizer that the run was trained with" in error


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
def test_text_comes_as_it_is_complete(kind: str, tmp_path: Path) -> None:
    text = ByteText() if kind == "bytes" else TokenText(add_tokenizer(tmp_path) / "tokenizer.json")
    ids = text.encode(TEXT, False)
    for cut in (0, 4):  # between letters, as prompts end
        text.begin(ids[:cut])
        pieces = [text.add(token) for token in ids[cut:]]
        assert "".join(pieces) == TEXT.encode()[cut:].decode("utf-8", "replace")
        assert text.end() == "" and max(map(len, pieces)) == 1
    text.begin([])
    assert text.add(ids[2]) == ""  # the first byte of two
    assert text.end() == "\ufffd"


@pytest.mark.ranks(1)
def test_tokens_and_chat_of_a_folder(tmp_path: Path) -> None:
    template = ("{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
                "{% if add_generation_prompt %}: {% endif %}")  # fmt: skip
    folder = add_tokenizer(
        save(tmp_path / "model"), bos_token={"content": "<s>"}, chat_template=template
    )
    words = (folder, "Hi", "--max-new-tokens", 12, "--temperature", 0)
    code, plain, speed = generate(*words)
    assert code == 0 and re.fullmatch(SPEED, speed) and speed.startswith("3 tokens of prompt")
    code, _, speed = generate(*words, "--chat")
    assert code == 0 and speed.startswith("6 tokens of prompt")  # <s> <|user|> H i : blank
    assert render_chat([folder], [{"role": "user", "content": "Hi"}]) == "<s><|user|>Hi: "
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    code, _, error = generate(*words, "--chat")
    assert code == 2 and "the chat template of" in error and "no such role" in error
    model = fsdpc.models.from_pretrained(folder)
    ids = TokenText(folder / "tokenizer.json").encode("Hi")
    end = int(model.generate(ids, 3)[-1])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 1]}))
    code, short, speed = generate(*words)
    assert code == 0 and len(short) < len(plain) and " new ones in " in speed


@pytest.mark.ranks(1)
def test_what_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    few = save(tmp_path / "few", vocab_size=99)
    (tmp_path / "empty").mkdir()
    tokens = add_tokenizer(tmp_path / "empty")
    for words, text in (
        ((tmp_path / "none", "a"), "nothing is downloaded"),
        ((tmp_path / "empty", "a"), "has neither config.json nor a checkpoint"),
        ((few, "a"), "has no tokenizer.json, but none, and the model has a vocabulary of 99"),
        ((few, "a", "--tokenizer", tokens), "has 259 tokens, and the model knows 99"),
        ((model, "a", "--tokenizer", tmp_path / "none"), "none does not exist"),
        ((model, ""), "the prompt has no tokens"),
        ((model, "a" * 200), "the prompt has 200 tokens, and the model was made for 200"),
        ((model, "a", "--chat"), "has no chat template"),
        ((model, "a", "--top-p", 2), "top_p must be above 0"),
    ):
        code, _, error = generate(*words)
        assert code == 2 and error.startswith("fsdpc generate: ") and text in error, error
    (model / "chat_template.jinja").write_text("x")
    with mock.patch.dict(sys.modules, {"jinja2": None}):
        assert "--chat needs the jinja2 package" in generate(model, "a", "--chat")[2]
    with mock.patch.dict(sys.modules, {"tokenizers": None}):
        error = generate(model, "a", "--tokenizer", tokens)[2]
    assert "needs the tokenizers package: pip install tokenizers" in error
    (model / "tokenizer.model").write_text("x")
    assert "a tokenizer of another kind" in generate(model, "a")[2]
