"""Text to folders of tokens: what is written, what is left of a killed run, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests.tokens import TEXT, byte_level, need_tokenizers, write_tokenizer

from fsdpc.cli import data
from fsdpc.data import TokenDataset, read_description
from fsdpc.data import tokenize as module
from fsdpc.data.tokenize import encode_files, tokenize, train_tokenizer
from fsdpc.data.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path / "small" / "tokenizer.json"))


def decoded(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    step = tokenizer.decoder()
    return "".join(step(int(number)) for number in ids)


# ---- tokenizers


def test_a_tokenizer_is_read_from_its_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    library = need_tokenizers().Tokenizer.from_file(str(tokenizer.path))
    assert tokenizer.vocab_size == library.get_vocab_size() and tokenizer.dtype == "uint16"
    assert tokenizer.name == "small" and Tokenizer(tokenizer.path.parent).sha256 == tokenizer.sha256
    assert tokenizer.find_end() == 0 == tokenizer.find_end("<|endoftext|>")
    (ids,) = tokenizer.encode([TEXT])
    assert ids.tolist() == library.encode(TEXT).ids and ids.dtype == np.uint32
    assert decoded(tokenizer, ids) == TEXT
    assert tokenizer.token_bytes[ids].sum() == len(TEXT.encode())  # exact, in spite of 日本
    assert tokenizer.token_bytes[0] == 0
    other = Tokenizer(write_tokenizer(tmp_path / "other.json", 310))
    assert other.name == "other" and other.sha256 != tokenizer.sha256


def test_what_text_spells_ends_no_document(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["a<|endoftext|>b"])
    assert 0 not in ids and decoded(tokenizer, ids) == "a<|endoftext|>b"


def test_bytes_of_tokens_that_are_not_byte_level(tmp_path: Path) -> None:
    lib = need_tokenizers()
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581an", -1.0), ("é", -2.0), ("<0x0A>", -3.0)]
    made = lib.Tokenizer(lib.models.Unigram(pieces, 0, True))
    made.pre_tokenizer = lib.pre_tokenizers.Metaspace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "unigram.json"))
    found = Tokenizer(tmp_path / "unigram.json")
    assert found.token_bytes[1:].tolist() == [0, 3, 2, 1] and found.find_end() == 1


def test_a_vocabulary_of_more_than_65536_needs_32_bits(tmp_path: Path) -> None:
    content = json.loads(byte_level())
    content["added_tokens"].append({"id": 65_536, "content": "<far>", "special": True})
    (tmp_path / "t.json").write_text(json.dumps(content))
    found = Tokenizer(tmp_path / "t.json")
    assert (found.vocab_size, found.dtype) == (65_537, "uint32")


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    for content in (b"\xff", b"[]", b'{"model": {}}', b'{"model": {"vocab": {"a": -1}}}'):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer .*t.json is no file of the tokenizers"):
            Tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b'{"model": {"vocab": {}}}')
    with pytest.raises(ValueError, match=r"t.json has no tokens"):
        Tokenizer(tmp_path / "t.json")
    with pytest.raises(FileNotFoundError, match=r"none.json: No such file"):
        Tokenizer(tmp_path / "none.json")
    (tmp_path / "t.json").write_bytes(b'{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ValueError, match=r"has no token of <\|endoftext\|>, .*--end-of-document"):
        Tokenizer(tmp_path / "t.json").find_end()
    with pytest.raises(ValueError, match=r"has no token '<e>' to end"):
        Tokenizer(tmp_path / "t.json").find_end("<e>")
    with pytest.raises(ValueError, match=r"tokenizer .*t.json: "):
        Tokenizer(tmp_path / "t.json").encode(["a"])


def test_the_package_is_needed_for_text_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert tokenizer.vocab_size and tokenizer.token_bytes.any()
    for call in (lambda: tokenizer.encode(["a"]), tokenizer.decoder):
        with pytest.raises(ImportError, match=r"pip install tokenizers"):
            call()


# ---- folders of tokens


def test_a_folder_of_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(TEXT * 3)
    rows = [{"text": "one line"}, {"text": ""}, {"text": "日本\ud800"}]
    lines = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    (tmp_path / "in" / "b.jsonl").write_text(lines)
    out = tmp_path / "deep" / "out"
    found = tokenize(tmp_path / "in", tokenizer, out, shard_tokens=30)
    assert read_description(out) == found
    documents = [TEXT * 3, "one line", "日本?"]
    assert found.documents == 3 and found.text_bytes == sum(len(d.encode()) for d in documents)
    assert found.tokenizer == {"name": "small", "sha256": tokenizer.sha256}
    assert Tokenizer(out).sha256 == tokenizer.sha256
    assert [shard["tokens"] for shard in found.shards[:-1]] == [30] * (len(found.shards) - 1)
    assert len(found.shards) > 1
    data = TokenDataset(out, 8)
    assert data.tokens == found.tokens and (data.vocab_size, data.end_of_document) == (300, 0)
    ids = data.run(0, data.tokens)
    wanted = [np.append(each, 0) for each in tokenizer.encode(documents)]
    assert np.array_equal(ids, np.concatenate(wanted)) and ids.dtype == np.uint16
    (own,) = encode_files([tmp_path / "in/a.txt"], tokenizer)
    assert np.array_equal(own, wanted[0]) and own.dtype == np.uint16
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]
    with pytest.raises(FileExistsError, match="out is there already: name another --output"):
        tokenize(tmp_path / "in", tokenizer, out)


def test_long_documents_are_cut_where_lines_end(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 40, newline="")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": TEXT * 40}))
    (whole,) = encode_files([tmp_path / "long.txt"], tokenizer)
    for size in (100, 333):
        monkeypatch.setattr(module, "_PIECE", size)
        for name in ("long.txt", "long.jsonl"):
            (ids,) = encode_files([tmp_path / name], tokenizer)
            assert np.array_equal(ids, whole)
    (tmp_path / "no lines.txt").write_text("x" * 1000)
    (ids,) = encode_files([tmp_path / "no lines.txt"], tokenizer)
    assert tokenizer.token_bytes[ids].sum() == 1000 and ids[-1] == 0


def test_memory_does_not_grow_with_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    peaks = []
    for count in (1, 8):
        (tmp_path / "text.txt").write_text(TEXT * (8_000 * count))  # 0.5 M and 4 M characters
        tracemalloc.start()
        tokenize(tmp_path / "text.txt", tokenizer, tmp_path / str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 5, peaks  # a piece is at most 2^20 characters


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"words \xff", "a.txt is no UTF-8 text: invalid start byte"),
        ("a.txt", b"words \0", r"a.txt is binary"),
        ("a.jsonl", b'{"text": "x"}\n{oops}', "a.jsonl, line 2: no JSON: "),
        ("a.jsonl", b'{"a": "x", "b": 1}', r"line 1: no text in 'text' \(there are: a, b\)"),
        ("a.jsonl", b'{"text": 3}', "line 1: no text in 'text'"),
        ("a.jsonl", b"[1]", r"line 1: no text in 'text' \(there are: no object\)"),
        ("a.jsonl", b'{"text": ""}\n', "a.jsonl and all other inputs hold no text"),
    ],
)
def test_inputs_that_are_refused_leave_nothing(
    name: str, content: bytes, text: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=text):
        tokenize(tmp_path / name, tokenizer, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "small"]


KILLED = """
import os, signal, sys
from fsdpc.data import tokenize as module
from fsdpc.data.tokenizer import Tokenizer
module._PIECE, calls = 100, []
def progress(documents, tokens):
    calls.append(tokens)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
module.tokenize(sys.argv[1], Tokenizer(sys.argv[2]), sys.argv[3], shard_tokens=20,
                progress=progress)
"""


def test_a_killed_run_leaves_no_folder_that_looks_complete(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT * 20)
    program = [sys.executable, "-c", KILLED, text, tokenizer.path, out]
    assert subprocess.run(program, timeout=300).returncode == -9
    left = tmp_path / ".out.tokenizing"
    assert not out.exists() and not (left / "tokens.json").exists()
    assert len(list(left.iterdir())) > 1
    out.mkdir()  # an empty folder is no output
    found = tokenize(text, tokenizer, out)
    assert not left.exists() and len(found.shards) == 1
    assert sorted(p.name for p in out.iterdir()) == [
        "shard-00000.bin", "tokenizer.json", "tokens.json",
    ]  # fmt: skip


def test_two_runs_do_not_write_one_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    refused = []

    def progress(documents: int, tokens: int) -> None:
        with pytest.raises(ValueError, match="another process is writing .*out") as found:
            tokenize(tmp_path / "text.txt", tokenizer, tmp_path / "out")
        refused.append(found)

    tokenize(tmp_path / "text.txt", tokenizer, tmp_path / "out", progress=progress)
    assert len(refused) == 1 and TokenDataset(tmp_path / "out", 2).tokens


# ---- the command


def test_a_tokenizer_is_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_tokenizers()
    (tmp_path / "text.txt").write_text(TEXT * 10)
    out = tmp_path / "new" / "mine.json"
    command_line = ["train-tokenizer", str(tmp_path / "text.txt"), "--vocab", "280", "--output"]
    assert data.main([*command_line, str(out)]) == 0
    assert "mine.json: 280 tokens" in capsys.readouterr().out
    made = Tokenizer(out)
    (ids,) = made.encode([TEXT])
    assert decoded(made, ids) == TEXT and len(ids) < len(TEXT.encode()) and made.find_end() == 0
    assert data.main([*command_line, str(out)]) == 2
    assert "mine.json is there already: name another --output" in capsys.readouterr().err
    with pytest.raises(ValueError, match="vocab_size must be at least 257 .*, got 256"):
        train_tokenizer(tmp_path / "text.txt", 256)


def test_the_command_makes_shows_and_lists(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": TEXT}))
    out = tmp_path / "out"
    options = ["tokenize", tmp_path / "a.jsonl", "--tokenizer", tokenizer.path, "--output", out]
    assert data.main(list(map(str, [*options, "--field", "body", "--shard-tokens", 20]))) == 0
    shown = capsys.readouterr().out
    assert "tokens of uint16 in " in shown and "1 document, " in shown
    assert f"tokenizer small, sha256 {tokenizer.sha256}" in shown
    assert data.main(["show", str(out), "--text", "9999", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert TEXT + "<|endoftext|>" in shown and "checksums and ids are right" in shown
    assert data.main(["list", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "folder" and row.split()[0] == str(out) and "small" in row
    path = out / "shard-00000.bin"
    ids = np.fromfile(path, np.uint16)
    for number, text in ((ids[3] + 1, "has the CRC-32C "), (300, "position 3 has the id 300")):
        ids[3] = number
        ids.tofile(path)
        assert data.main(["show", str(out), "--verify"]) == 2
        assert text in capsys.readouterr().err
    ids[:-1].tofile(path)
    for arguments, text in (
        (["show", str(out)], "shard-00000.bin has 19 tokens, and its tokens.json says 20"),
        (["show", str(tmp_path)], "has no tokens.json"),
        (["list", str(path)], "is no folder"),
        ([str(each) for each in options], "no text in 'text'"),
    ):
        if arguments[0] == "tokenize":
            arguments[-1] += "2"
        assert data.main(arguments) == 2
        assert text in capsys.readouterr().err


def test_the_command_line_knows_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdpc", "data", "show", "/nowhere"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("fsdpc data: /nowhere has no tokens")
