"""``fsdpc train`` on tokens: vocabulary, perplexity and bits per byte, samples, resumed runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tokens import TEXT, need_tokenizers, write_tokenizer

import fsdpc
from fsdpc import models
from fsdpc.cli import train, train_tokens
from fsdpc.cli.train_tokens import evaluation, make_source, with_vocabulary
from fsdpc.data import TokenDataset, TokenDescription
from fsdpc.data.tokenize import tokenize
from fsdpc.data.tokenizer import Tokenizer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}


class Place:
    """Three documents as text, a tokenizer, and their tokens in a folder."""

    def __init__(self, folder: Path) -> None:
        self.text, self.tokens = folder / "text", folder / "tokens"
        self.text.mkdir()
        for name, times in (("a.txt", 56), ("b.txt", 2), ("c.txt", 2)):
            (self.text / name).write_text(TEXT * times)
        self.tokenizer = write_tokenizer(folder / "small.json")
        tokenize(self.text, Tokenizer(self.tokenizer), self.tokens, shard_tokens=500)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("tokens"))


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdpc", "train", "--batch", "2", "--seq", "32", *options]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )


def parsed(*options: object) -> Any:
    return train.parse(["--seq", "32", *map(str, options)])


def test_tokens_of_a_folder_and_of_text_are_the_same_run(place: Place, tmp_path: Path) -> None:
    """On two ranks, and on one from a checkpoint on."""
    common = ("--ranks", 2, "--steps", 2, "--sample", 20)
    found = []
    for name, data in (
        ("folder", ("--data", place.tokens)),
        ("text", ("--data", place.text, "--tokenizer", place.tokenizer)),
    ):
        more = ("--metrics", tmp_path / name, "--checkpoint", tmp_path / f"{name}-run")
        done = run(*common, *data, *more)
        assert done.returncode == 0, done.stderr
        found.append((done.stdout, json.loads((tmp_path / name).read_text().splitlines()[-1])))
    (output, last), (_, of_text) = found
    assert last["params_crc32c"] == of_text["params_crc32c"]
    assert last["val_loss"] == of_text["val_loss"]
    assert "tokens of 'small' (vocabulary 300) to train on,\n" in output
    model = models.Llama(models.preset("2M").with_(vocab_size=300))
    assert f"{model.num_parameters():,} parameters" in output

    held_out = make_source(parsed("--data", place.tokens)).datasets()[1]
    targets = np.concatenate([held_out[i][1] for i in range(len(held_out))])
    targets = targets[targets != -100]
    size = int(Tokenizer(place.tokenizer).token_bytes[targets].sum())
    assert last["val_tokens"] == len(targets) < len(held_out) * 32  # a border of documents
    bits = last["val_loss"] * len(targets) / math.log(2) / size
    assert last["val_bits_per_byte"] == pytest.approx(bits)
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    assert f" nats per token, {bits:.3f} bits per byte, perplexity " in output
    assert "---- sample ----\n[0] <|endoftext|>" in output and "no sample" not in output

    again = run("--steps", 3, "--data", place.tokens, "--checkpoint", tmp_path / "text-run",
                "--resume", "--sample", 0, "--eval-bytes", 0)  # fmt: skip
    assert again.returncode == 0 and "resumed after step 2" in again.stdout


def test_a_resume_with_another_tokenizer_is_refused_by_name(place: Place, tmp_path: Path) -> None:
    data = ("--data", place.text, "--checkpoint", tmp_path / "run", "--sample", 0, "--vocab", 310)
    quick = ("--steps", 0, "--eval-bytes", 0)
    assert run(*data, *quick, "--tokenizer", place.tokenizer).returncode == 0
    other = write_tokenizer(tmp_path / "other.json", 310)
    old, new = (Tokenizer(path).sha256[:16] for path in (place.tokenizer, other))
    done = run(*data, *quick, "--resume", "--tokenizer", other)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    was = rf"step-00000000 was trained with the tokenizer 'small' \(sha256 {old}\)"
    text = rf"with the tokenizer 'other' \(sha256 {new}\)"
    assert re.search(f"{was}, and this run is {text}: resume with the same", done.stderr)
    done = run(*data, *quick, "--resume")  # by the checkpoint's
    assert done.returncode == 0 and "resumed after step 0" in done.stdout, done.stderr


def test_a_checkpoint_of_bytes_is_not_resumed_on_tokens(place: Place, tmp_path: Path) -> None:
    for extra in ({"step": 3}, None, {"tokenizer": None}):
        content = {"extra": extra}
        train_tokens.check_resumed(tmp_path, content, None, 5)
        with pytest.raises(ValueError, match="was trained on bytes, .* 'x' .sha256 abc"):
            train_tokens.check_resumed(tmp_path, content, {"name": "x", "sha256": "abc"}, 5)


def test_documents_apart(place: Place, tmp_path: Path) -> None:
    """With and without activations recomputed; other numbers than of documents together."""
    (tmp_path / "many.jsonl").write_text(f"{json.dumps({'text': TEXT})}\n" * 60)
    tokenize(tmp_path / "many.jsonl", Tokenizer(place.tokenizer), tmp_path / "many")
    common = ("--ranks", 2, "--data", tmp_path / "many", "--steps", 2, "--sample", 0,
              "--dtype", "fp32", "--eval-bytes", 64)  # fmt: skip
    apart = "--separate-documents"
    found = []
    for more in ((), (apart,), (apart, "--checkpoint-activations")):
        done = run(*common, *more)
        assert done.returncode == 0, done.stderr
        found.append(re.search(r"parameters crc32c (\w+)", done.stdout)[1])
    assert found[1] == found[2] != found[0]
    with pytest.raises(ValueError, match="--separate-documents is for tokens"):
        make_source(parsed(apart))
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "a.bin")
    TokenDescription(dtype="uint16", vocab_size=400).write(tmp_path)
    with pytest.raises(ValueError, match="the tokens.json of .* has no end_of_document"):
        make_source(parsed("--data", tmp_path, apart))
    x = np.array([[5, 0, 7, 8], [1, 2, 3, 4]])
    assert make_source(parsed("--data", place.tokens)).arguments(x) == {}
    lengths = make_source(parsed("--data", place.tokens, apart)).arguments(x)
    assert lengths == {"lengths": [2, 2, 4]}


def test_the_vocabulary_of_the_model(place: Place, tmp_path: Path) -> None:
    preset = models.preset("2M")

    def vocabulary(*options: object) -> int:
        return with_vocabulary(parsed(*options), preset).vocab_size

    assert vocabulary() == 256 == vocabulary("--data", place.text)
    assert vocabulary("--data", place.tokens) == 300 == vocabulary("--tokenizer", place.tokenizer)
    assert vocabulary("--data", place.tokens, "--vocab", 320) == 320 == vocabulary("--vocab", 320)
    with pytest.raises(ValueError, match="--vocab 299 is smaller than .* 'small', 300"):
        vocabulary("--data", place.tokens, "--vocab", 299)
    with pytest.raises(ValueError, match="--vocab 255 is smaller than the vocabulary of bytes"):
        vocabulary("--vocab", 255)
    options = parsed("--data", place.tokens)
    options.init_from = Path("published")
    assert with_vocabulary(options, preset.with_(vocab_size=512)).vocab_size == 512
    with pytest.raises(ValueError, match="published has a vocabulary of 256, and .* 300: take its"):
        with_vocabulary(options, preset)
    options = parsed("--preset", "2M", "--tokenizer", place.tokenizer)
    assert train.make_model(options).config.vocab_size == 300


def test_data_that_do_not_go_together_are_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_tokenizer(tmp_path / "other.json", 310)
    with pytest.raises(ValueError, match=r"--data has tokens \(.*tokens\) and text \(.*text\)"):
        make_source(parsed("--data", place.text, place.tokens))
    with pytest.raises(ValueError, match=r"made with the tokenizer 'small' .*, not with .*other"):
        make_source(parsed("--data", place.tokens, "--tokenizer", other))
    monkeypatch.setattr(train_tokens, "TEXT_BYTES", 100)
    with pytest.raises(ValueError, match="write tokens once, fsdpc data tokenize"):
        make_source(parsed("--data", place.text, "--tokenizer", place.tokenizer)).check()


def test_tokens_that_somebody_else_wrote(tmp_path: Path) -> None:
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "a.bin")
    TokenDescription(dtype="uint16").write(tmp_path)
    for data in (tmp_path, tmp_path / "a.bin"):
        with pytest.raises(ValueError, match="give --tokenizer FILE or --vocab N, or write "):
            make_source(parsed("--data", data))
    source = make_source(parsed("--data", tmp_path, "--vocab", 390))
    trained, held_out = source.datasets()
    assert isinstance(trained, TokenDataset) and source.text_bytes(trained[0][1]) == 0
    with pytest.raises(ValueError, match="position 390 has the id 390, beyond the vocabulary"):
        held_out.batch(range(len(held_out)))
    with pytest.raises(ImportError, match="give --tokenizer FILE"):
        source.decoder()
    assert source.identity == {"name": "unknown", "sha256": ""}


def test_only_samples_need_the_package(place: Place) -> None:
    """The tokens' own tokenizer gives vocabulary and bytes."""
    program = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from fsdpc.cli import train; sys.exit(train.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--data", place.tokens, "--steps", "1", "--batch", "2",
         "--seq", "32", "--sample", "5"],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout
    assert re.search(r"no sample: .* pip install tokenizers", done.stdout)


def test_what_an_evaluation_says() -> None:
    text, record = evaluation(math.log(2), 8, 8, "byte")
    assert text == "validation loss 0.6931 nats per byte, 1.000 bits"
    assert record == {"val_loss": math.log(2), "val_tokens": 8, "val_bits_per_byte": 1.0,
                      "val_perplexity": pytest.approx(2)}  # fmt: skip
    text, record = evaluation(math.log(16), 8, 32, "token")
    assert text == "validation loss 2.7726 nats per token, 1.000 bits per byte"
    assert record["val_bits_per_byte"] == pytest.approx(1)
    assert record["val_perplexity"] == pytest.approx(16)
    text, record = evaluation(1.0, 8, 0, "token")
    assert "bits" not in text and "val_bits_per_byte" not in record


def test_the_five_commands_of_the_page(tmp_path: Path) -> None:
    """From a text file to a run on its tokens, as docs/data.md shows it, in fewer steps."""
    need_tokenizers()
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    first, *commands = page.split("```sh\n")[1].split("```")[0].splitlines()
    assert first.startswith("pip install") and len(commands) == 4
    (tmp_path / "notes.txt").write_text(TEXT * 60)
    for line in commands:
        words = line.partition("  #")[0].split()
        assert words[0] == "fsdpc"
        few = ["--steps", "2", "--batch", "2", "--seq", "32"] if words[1] == "train" else []
        done = subprocess.run(
            [sys.executable, "-m", *words, *few], cwd=tmp_path, capture_output=True, text=True,
            timeout=300, env=ENVIRONMENT,
        )  # fmt: skip
        assert done.returncode == 0, line + done.stderr
    assert "bits per byte" in done.stdout and "---- sample ----" in done.stdout
