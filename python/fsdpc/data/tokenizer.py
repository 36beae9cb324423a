"""Tokenizers in the file format of the ``tokenizers`` package.

Training reads the file as JSON to get the vocabulary, the id that ends documents, and the number of
text bytes per id. The package is needed only to convert between text and ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc.data.files import PathLike, explained

#: Tokens that end a document in published tokenizers, the most likely first.
ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]",
)  # fmt: skip
_BLANK = "\u2581"  # Metaspace's representation of a blank


class Tokenizer:
    """A tokenizer file.

    Parameters
    ----------
    path : path
        A ``tokenizer.json``, as saved by ``tokenizers`` or transformers, or a folder with one.

    Attributes
    ----------
    path : pathlib.Path
        The file.
    name : str
        The tokenizer's name; for a ``tokenizer.json``, the folder's name.
    sha256 : str
        SHA-256 of the file, hexadecimal.
    vocab_size : int
        The largest id plus 1.

    Raises
    ------
    FileNotFoundError, PermissionError, ValueError
        The file is missing, unreadable or not a tokenizer; the message names it.
    """

    def __init__(self, path: PathLike) -> None:
        self.path: Path = Path(path)
        if self.path.is_dir():
            self.path /= "tokenizer.json"
        with explained(self.path):
            self._bytes = self.path.read_bytes()
        self.sha256: str = hashlib.sha256(self._bytes).hexdigest()
        whole = self.path.resolve()
        self.name: str = whole.parent.name if whole.name == "tokenizer.json" else whole.stem
        try:
            self._json: dict[str, Any] = json.loads(self._bytes)
            self._tokens, self._special = _tokens_of(self._json)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"tokenizer {self.path} is no file of the tokenizers package (tokenizer.json): "
                f"{error or type(error).__name__}"
            ) from None
        if not self._tokens:
            raise ValueError(f"tokenizer {self.path} has no tokens")
        self.vocab_size: int = max(self._tokens) + 1

    @property
    def dtype(self) -> str:
        """The smallest dtype that can hold the ids, either "uint16" or "uint32"."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    @property
    def data(self) -> bytes:
        """The file's bytes."""
        return self._bytes

    def find_end(self, token: str | None = None) -> int:
        """Return the id of the token that ends documents.

        Parameters
        ----------
        token : str, optional
            The token; by default the first of :data:`ENDS` in the vocabulary.

        Raises
        ------
        ValueError
            There is no such token; the message explains what to do.
        """
        ids = {text: number for number, text in self._tokens.items()}
        for each in ENDS if token is None else (token,):
            if each in ids:
                return ids[each]
        wanted = repr(token) if token is not None else f"of {', '.join(ENDS)}"
        raise ValueError(
            f"tokenizer {self.path} has no token {wanted} to end documents with: name one that it "
            "has with --end-of-document"
        )

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of text per id, as int64 of shape (vocab_size,).

        Special tokens have 0 bytes. The result is exact if the pre-tokenizer is ByteLevel;
        otherwise it excludes any text that a normalizer removed.
        """
        found = np.zeros(self.vocab_size, np.int64)
        byte_level = '"ByteLevel"' in json.dumps([
            self._json.get("pre_tokenizer"), self._json.get("decoder")
        ])  # fmt: skip
        added = {each["id"] for each in self._json.get("added_tokens") or ()}
        prefix = self._json["model"].get("continuing_subword_prefix") or ""
        for number, text in self._tokens.items():
            if number in self._special:
                continue
            if byte_level and number not in added:
                found[number] = len(text)  # each character stands for a byte
            elif re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
                found[number] = 1
            else:
                found[number] = len(text.replace(_BLANK, " ").removeprefix(prefix).encode())
        return found

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts without special tokens, using all cores.

        Parameters
        ----------
        texts : sequence of str

        Returns
        -------
        list of numpy.ndarray of uint32, (tokens,)

        Raises
        ------
        ImportError
            The tokenizers package is not installed.
        """
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in found]

    def decoder(self) -> Callable[[int], str]:
        """Return a function that maps successive ids to the text that each id completes.

        Raises
        ------
        ImportError
            The tokenizers package is not installed.
        """
        library = self._library  # raises with an explanation if the package is missing
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return lambda number: stream.step(library, number) or ""

    @cached_property
    def _library(self) -> Any:
        tokenizers = import_tokenizers(f"tokenizer {self.path}")
        try:
            library = tokenizers.Tokenizer.from_str(self._bytes.decode())
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"tokenizer {self.path}: {error}") from None
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # plain text must not end a document
        return library


def import_tokenizers(what: str) -> Any:
    """Import and return the tokenizers package; an ImportError names the feature that needs it."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            f"{what} needs the tokenizers package: pip install tokenizers"
        ) from None
    return tokenizers


def _tokens_of(found: dict[str, Any]) -> tuple[dict[int, str], set[int]]:
    """Return a dict that maps ids to tokens, and the set of special ids."""
    vocab = found["model"]["vocab"]
    if isinstance(vocab, dict):
        tokens = {int(number): text for text, number in vocab.items()}
    else:  # Unigram: (token, score), by id
        tokens = {number: text for number, (text, _) in enumerate(vocab)}
    added = found.get("added_tokens") or []
    tokens.update({int(each["id"]): each["content"] for each in added})
    if min(tokens, default=0) < 0:
        raise ValueError("an id is negative")
    return tokens, {int(each["id"]) for each in added if each.get("special")}
