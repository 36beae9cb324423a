"""A small tokenizer, for the tests of tokens."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TEXT = "the quick brown fox jumps over the lazy dog.\n    déjà vu, 日本 語!\n\n"


def need_tokenizers() -> Any:
    """Return the tokenizers package; without it the test is skipped, and in CI fails."""
    if "CI" not in os.environ:
        pytest.importorskip("tokenizers", reason="needs tokenizers")
    import tokenizers

    return tokenizers


@cache
def byte_level(words: int = 300) -> str:
    """Return a byte-level BPE as JSON; the id 0 ends documents."""
    lib = need_tokenizers()
    made = lib.Tokenizer(lib.models.BPE())
    made.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = lib.decoders.ByteLevel()
    made.train_from_iterator(
        [TEXT * 5],
        lib.trainers.BpeTrainer(
            vocab_size=words, special_tokens=["<|endoftext|>"], show_progress=False,
            initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return made.to_str()


def write_tokenizer(path: Path, words: int = 300) -> Path:
    """Write it to a file, and return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(byte_level(words))
    return path
