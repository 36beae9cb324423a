"""Token files: descriptions, vocabulary, borders of documents, a cursor through many files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpc.data import (
    DistributedSampler,
    Loader,
    TokenDataset,
    TokenDescription,
    documents_in,
    read_description,
)

END = 0


def described(folder: Path, **rows: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokens.json").write_text(json.dumps(rows))
    return folder


def test_a_description_beside_the_files_gives_dtype_and_vocabulary(tmp_path: Path) -> None:
    described(tmp_path, dtype="uint32", vocab_size=70_000, end_of_document=END)
    ids = np.arange(60_000, 60_100, dtype=np.uint32)
    ids[:50].tofile(tmp_path / "a.bin")
    ids[50:].tofile(tmp_path / "b.bin")
    for paths in (tmp_path, [tmp_path / "a.bin", tmp_path / "b.bin"]):
        data = TokenDataset(paths, 9)
        assert np.array_equal(data.run(0, data.tokens), ids)
        assert (data.vocab_size, data.end_of_document) == (70_000, END)
    assert TokenDataset(tmp_path, 9, vocab_size=80_000).vocab_size == 80_000
    with pytest.raises(ValueError, match=r"tokens.json says uint32, got dtype uint16: leave it"):
        TokenDataset(tmp_path, 9, np.uint16)


def test_shards_come_in_the_order_of_the_description(tmp_path: Path) -> None:
    np.array([3, 4, 5], np.uint16).tofile(tmp_path / "a.bin")
    np.array([1, 2], np.uint16).tofile(tmp_path / "z.bin")
    np.array([9], np.uint16).tofile(tmp_path / "not-listed.bin")
    shards = ({"file": "z.bin", "tokens": 2}, {"file": "a.bin", "tokens": 3})
    description = TokenDescription(dtype="uint16", vocab_size=6, shards=shards)
    description.write(tmp_path)
    assert read_description(tmp_path) == description and description.tokens == 5
    data = TokenDataset(tmp_path, 2)
    assert data.run(0, 5).tolist() == [1, 2, 3, 4, 5]
    np.array([3, 4], np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"a.bin has 2 tokens, and its tokens.json says 3"):
        TokenDataset(tmp_path, 2)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"a.bin: No such file"):
        TokenDataset(tmp_path, 2)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({}, "dtype is uint16 or uint32, not ''"),
        ({"dtype": "int8"}, "not 'int8'"),
        ({"dtype": "uint16", "vocab_size": -1}, "vocab_size is a whole number, not -1"),
        ({"dtype": "uint16", "vocab_size": True}, "vocab_size is a whole number, not True"),
        ({"dtype": "uint16", "shards": [{"file": "../x", "tokens": 1}]}, "a shard has a file"),
        ({"dtype": "uint16", "shards": 3}, "int"),
        ({"dtype": "uint16", "tokenizer": {"name": "x"}}, "a tokenizer has a name and a sha256"),
        ([], "list"),
    ],
)
def test_descriptions_that_are_none_are_named(rows: Any, text: str, tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "tokens.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=f"tokens.json describes no token files: .*{text}"):
        TokenDataset(tmp_path, 2)


def test_folders_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 10), ("c", 12)):
        folder = described(tmp_path / name, dtype="uint16", vocab_size=size)
        np.arange(9, dtype=np.uint16).tofile(folder / "0.bin")
    assert TokenDataset([tmp_path / "a", tmp_path / "b"], 2).tokens == 18
    with pytest.raises(ValueError, match=r"a/tokens.json has vocab_size 10, and .*c/tokens.json 1"):
        TokenDataset(tmp_path, 2)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path: Path, dtype: type) -> None:
    ids = np.arange(100, dtype=np.uint32) % 50
    ids[77] = 2**31 + 5  # negative as an int32
    ids[:40].tofile(tmp_path / "a.bin")
    ids[40:].tofile(tmp_path / "b.bin")
    data = TokenDataset(tmp_path, 10, np.uint32, vocab_size=50)
    data.batch([0, 1, 2, 3, 4, 5, 6], dtype)
    text = r"b.bin: position 37 has the id 2147483653, beyond the vocabulary of 50"
    with pytest.raises(ValueError, match=text):
        data.batch([2, 7], dtype)
    with pytest.raises(ValueError, match=text):
        data.split(40)[1].batch([1], dtype)
    ids[77], ids[70] = 1, 50  # as a target alone
    ids[40:].tofile(tmp_path / "b.bin")
    data = TokenDataset(tmp_path, 10, np.uint32, vocab_size=50)
    with pytest.raises(ValueError, match=r"b.bin: position 30 has the id 50"):
        data.batch([6], dtype)
    assert TokenDataset(tmp_path, 10, np.uint32).batch([6], dtype)[1][0, -1] == 50


def test_without_a_vocabulary_int32_holds_what_it_can(tmp_path: Path) -> None:
    np.array([1, 2**31, 3, 4], np.uint32).tofile(tmp_path / "a.bin")
    data = TokenDataset(tmp_path, 3, np.uint32)
    assert data[0][0].tolist() == [1, 2**31, 3]
    with pytest.raises(ValueError, match="position 1 has the id 2147483648, beyond int32"):
        data.batch([0], np.int32)


def test_borders_of_documents(tmp_path: Path) -> None:
    ids = [5, 6, END, 7, END, 8, 9, 1, END, 2, 3, 4, END]
    np.save(tmp_path / "a.npy", np.array(ids[:4], np.uint16))
    np.save(tmp_path / "b.npy", np.array(ids[4:], np.uint16))
    data = TokenDataset(tmp_path, 4, end_of_document=END, ignore_index=-100)
    x, y = data.batch([0, 1, 2])
    assert x.tolist() == [[5, 6, END, 7], [END, 8, 9, 1], [END, 2, 3, 4]]
    assert y.tolist() == [[6, END, -100, END], [-100, 9, 1, END], [-100, 3, 4, END]]
    assert data.document_starts().tolist() == [0, 3, 5, 9]
    held_out = data.split(8)[1]
    assert held_out.document_starts().tolist() == [0, 4] and held_out[0][1].tolist()[:2] == [9, 1]
    documents, positions = documents_in(x, END)
    assert documents.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 0, 1, 2]]
    plain = TokenDataset(tmp_path, 4)
    assert plain[0][1].tolist() == [6, END, 7, END]
    with pytest.raises(ValueError, match="no end_of_document was given"):
        plain.document_starts()
    with pytest.raises(ValueError, match="ignore_index -100 needs end_of_document"):
        TokenDataset(tmp_path, 4, ignore_index=-100)


def test_a_cursor_goes_through_many_files_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    """1, 4 and 3 ranks in turn see each sequence of the epoch once, over borders of files."""
    sizes = [7, 1, 30, 64, 2, 97]
    ids = np.arange(sum(sizes), dtype=np.uint16)
    for i, part in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        part.tofile(tmp_path / f"{i}.bin")
    data = TokenDataset(tmp_path, 4)
    state, seen = None, []
    for world, steps in ((1, 7), (4, 3), (3, 8)):
        loaders = [
            Loader(data, 1, DistributedSampler(len(data), rank, world, drop_last=True), workers=2)
            for rank in range(world)
        ]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
            with loader:
                seen += [next(loader)[0] for _ in range(steps)]
        (state,) = {tuple(loader.state_dict().items()) for loader in loaders}
        state = dict(state)
    assert len(seen) == 43 and state["sequences"] == 43 and state["epoch"] == 0
    firsts = sorted(int(x[0, 0]) for x in seen)
    assert len(set(firsts)) == 43 and all(first % 4 == 0 for first in firsts)
    assert all(np.array_equal(x[0], np.arange(x[0, 0], x[0, 0] + 4)) for x in seen)
