"""The training data of ``fsdpc train``: bytes of text, or a tokenizer's tokens.

The options select a source. The source provides the sequences, the model's vocabulary size, the
number of text bytes that targets represent, and the conversion of ids to text.
"""

from __future__ import annotations

import argparse
import codecs
import math
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fsdpc.data import (
    ByteDataset,
    PackedSequences,
    SequenceDataset,
    TokenDataset,
    TokenDescription,
    default_corpus,
    document_lengths,
    read_description,
)
from fsdpc.data.description import NAME
from fsdpc.data.files import find_files, refuse_binary
from fsdpc.data.tokenizer import Tokenizer

HELD_OUT = 500_000  # bytes or tokens; at most a tenth of the data
IGNORED = -100  # a target that losses ignore
TEXT_BYTES = 64 << 20  # maximum text that each rank encodes in memory

Parts = tuple[SequenceDataset, SequenceDataset]


def add_options(data: Any) -> None:
    """Add the ``fsdpc train`` options for tokens."""
    data.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json: train on tokens of the text (default: on bytes; for folders of "
        "`fsdpc data tokenize` theirs)",
    )
    data.add_argument(
        "--vocab",
        type=int,
        metavar="N",
        help="ids that the model knows (default: the tokenizer's; of bytes, the preset's)",
    )


def make_source(options: argparse.Namespace) -> Bytes | Tokens:
    """Return the training data that the options specify.

    Raises
    ------
    ValueError
        The options specify both tokens and text, their tokenizers differ, or the vocabulary is too
        small; the message contains both values.
    OSError
        A file is missing or unreadable.
    """
    paths = options.data or []
    tokens = [path for path in paths if _is_tokens(path)]
    if tokens and len(tokens) < len(paths):
        text = next(path for path in paths if path not in tokens)
        raise ValueError(f"--data has tokens ({tokens[0]}) and text ({text}): name one kind")
    source = Tokens(options) if tokens or options.tokenizer else Bytes(options)
    if options.vocab is not None and options.vocab < source.vocab_size:
        raise ValueError(
            f"--vocab {options.vocab} is smaller than the vocabulary of {source.title}, "
            f"{source.vocab_size}"
        )
    return source


def with_vocabulary(options: argparse.Namespace, config: Any) -> Any:
    """Return a model's shape with the vocabulary size from ``--vocab`` or the tokenizer.

    A model that starts from a published one keeps that model's vocabulary, which must be large
    enough.
    """
    if not hasattr(options, "tokenizer"):  # a command that reads no data
        return config
    tokens = options.tokenizer or any(map(_is_tokens, options.data or []))
    if not tokens and options.vocab is None:
        return config
    source = make_source(options)
    if getattr(options, "init_from", None) is None:
        return config.with_(vocab_size=options.vocab or source.vocab_size)
    if source.vocab_size > config.vocab_size or options.vocab not in (None, config.vocab_size):
        raise ValueError(
            f"the model of {options.init_from} has a vocabulary of {config.vocab_size}, and "
            f"{source.title} {options.vocab or source.vocab_size}: take its own tokenizer"
        )
    return config


def check_resumed(
    path: Path, content: dict[str, Any], identity: dict[str, str] | None, sequences: int
) -> None:
    """Raise if the checkpoint was trained with a different tokenizer or different data.

    Parameters
    ----------
    path : Path
    content : dict
        The checkpoint's manifest.
    identity : dict, optional
        Name and hash of this run's tokenizer.
    sequences : int
        Number of sequences that this run trains on.
    """
    extra = content.get("extra")
    saved = extra.get("tokenizer") if isinstance(extra, dict) else None
    if (saved or {}).get("sha256") != (identity or {}).get("sha256"):
        raise ValueError(
            f"{path} was trained {_with(saved)}, and this run is {_with(identity)}: resume with "
            "the same --tokenizer and --data, or name another --checkpoint folder"
        )
    data = content.get("data")
    theirs = data.get("length") if isinstance(data, dict) else None
    if theirs not in (None, sequences):
        raise ValueError(
            f"{path} was trained on {theirs} sequences, and --data has {sequences}: resume with "
            "the same --data, or name another --checkpoint folder"
        )


def _with(identity: dict[str, str] | None) -> str:
    if identity is None:
        return "on bytes, without a tokenizer"
    return f"with the tokenizer '{identity['name']}' (sha256 {identity['sha256'][:16] or '-'})"


def _is_tokens(path: Path) -> bool:
    return (path / NAME).is_file() or (path.suffix in (".npy", ".bin") and path.is_file()
                                       and (path.parent / NAME).is_file())  # fmt: skip


def _split(data: SequenceDataset) -> Parts:
    return data.split(min(HELD_OUT, max(data.tokens // 10, data.seq_len + 1)))


class Bytes:
    """The bytes of text files, used as ids."""

    unit = "byte"
    title = "bytes"
    identity: None = None
    vocab_size: int = 256
    tokenizer: None = None
    prompt: np.ndarray = np.frombuffer(b"def ", np.uint8)

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        if options.separate_documents:
            raise ValueError("--separate-documents is for tokens: bytes have no end of a document")

    def arguments(self, x: np.ndarray) -> dict[str, Any]:
        """Return the model's arguments other than ids and targets."""
        return {}

    def check(self) -> Parts | None:
        """Raise if the data are not text; return the sequences if cheap to load."""
        if not self.options.data:
            return None
        refuse_binary(self.options.data)
        return self.datasets()

    def datasets(self) -> Parts:
        """Return the training sequences and the held-out sequences."""
        return _split(ByteDataset(self.options.data or default_corpus(), self.options.seq))

    def header(self) -> str:
        """Describe the training data; the caller appends the amount of data per step."""
        return "bytes of text to train on, "

    def text_bytes(self, targets: np.ndarray) -> int:
        """Return how many bytes of text the targets represent."""
        return int(np.count_nonzero(targets != IGNORED))

    def decoder(self) -> Callable[[int], str]:
        """Return a function that takes one id at a time and returns the text that it completes."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return lambda word: decode(bytes([word])) if word < 256 else "\ufffd"


class Tokens:
    """Tokens from folders, or from text that each rank encodes at startup."""

    unit = "token"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        paths = options.data or []
        folders = {path if path.is_dir() else path.parent for path in paths if _is_tokens(path)}
        described = [(folder, read_description(folder)) for folder in sorted(folders)]
        self.described: TokenDescription | None = described[0][1] if described else None
        self.tokenizer: Tokenizer | None = _tokenizer(options.tokenizer, described)
        for folder, found in described:
            self._check_hash(folder, found)
        self.name: str = self._identity()["name"]
        self.title: str = f"the tokenizer '{self.name}'"
        sizes = [found.vocab_size or 0 for _, found in described]
        self.vocab_size: int = max([*sizes, self.tokenizer.vocab_size if self.tokenizer else 0])
        self.vocab_size = self.vocab_size or options.vocab or 0
        if not self.vocab_size:
            raise ValueError(
                f"no vocabulary is known of {paths[0]}: give --tokenizer FILE or --vocab N, or "
                f"write vocab_size into its {NAME}"
            )

        if options.separate_documents and self.end is None:
            raise ValueError(f"--separate-documents: the {NAME} of {paths[0]} has no "
                             "end_of_document")  # fmt: skip

    def arguments(self, x: np.ndarray) -> dict[str, Any]:
        """Return the model's arguments other than ids and targets."""
        if not self.options.separate_documents:
            return {}
        return {"lengths": document_lengths(x, self.end)}

    def _check_hash(self, folder: Path, found: TokenDescription | None) -> None:
        theirs = found.tokenizer if found else None
        own = self.tokenizer.sha256 if self.tokenizer else None
        if theirs and own and theirs["sha256"] != own:
            raise ValueError(
                f"{folder} was made with the tokenizer '{theirs.get('name')}' (sha256 "
                f"{theirs['sha256'][:16]}), not with {self.tokenizer.path} (sha256 {own[:16]})"
            )

    def _identity(self) -> dict[str, str]:
        theirs = (self.described.tokenizer if self.described else None) or {}
        own = self.tokenizer
        return {"name": theirs.get("name") or (own.name if own else "unknown"),
                "sha256": theirs.get("sha256") or (own.sha256 if own else "")}  # fmt: skip

    @cached_property
    def identity(self) -> dict[str, str]:
        """Name and hash of the tokenizer, as stored in checkpoints."""
        return self._identity()

    @property
    def end(self) -> int | None:
        """The id that ends documents."""
        if self.described is not None:
            return self.described.end_of_document
        return self.tokenizer.find_end()

    def check(self) -> Parts | None:
        """Raise if the data cannot be used for training; return the sequences if cheap to load."""
        if self.described is not None:
            return self.datasets()
        refuse_binary(self.options.data or default_corpus())
        self._text_files()
        return None

    def _text_files(self) -> list[Path]:
        files = find_files(self.options.data or default_corpus(), ())
        size = sum(path.stat().st_size for path in files)
        if size > TEXT_BYTES:
            raise ValueError(
                f"--data has {size / 2**20:,.0f} MiB of text, and each rank encodes at most "
                f"{TEXT_BYTES >> 20} MiB when it starts: write tokens once, fsdpc data tokenize "
                f"{files[0]} ... --tokenizer {self.tokenizer.path} --output tokens, and train with "
                "--data tokens"
            )
        return files

    def datasets(self) -> Parts:
        """Return the training sequences and the held-out sequences."""
        seq = self.options.seq
        if self.described is None:
            from fsdpc.data.tokenize import encode_files

            documents = encode_files(self._text_files(), self.tokenizer)
            return _split(PackedSequences(documents, seq, ignore_index=IGNORED))
        ignored = None if self.end is None else IGNORED
        return _split(TokenDataset(self.options.data, seq, vocab_size=self.vocab_size,
                                   ignore_index=ignored))  # fmt: skip

    def header(self) -> str:
        """Describe the training data; the caller appends the amount per step."""
        return f"tokens of '{self.name}' (vocabulary {self.vocab_size:,}) to train on,\n"

    def text_bytes(self, targets: np.ndarray) -> int:
        """Return how many bytes of text the targets represent, or 0 if no tokenizer is known."""
        if self.tokenizer is None:
            return 0
        return int(self.tokenizer.token_bytes[targets[targets != IGNORED]].sum())

    @property
    def prompt(self) -> np.ndarray:
        """Return the beginning of a document, used as the prompt for samples."""
        return np.array([self.end or 0])

    def decoder(self) -> Callable[[int], str]:
        """Return a function that maps each successive id to the text that it completes.

        Raises
        ------
        ImportError
            The tokenizers package is not installed, or no tokenizer is known.
        """
        if self.tokenizer is None:
            raise ImportError("no tokenizer is known that could decode it: give --tokenizer FILE")
        return self.tokenizer.decoder()


def _tokenizer(
    given: Path | None, described: list[tuple[Path, TokenDescription | None]]
) -> Tokenizer | None:
    """Return the tokenizer from the options, or the copy stored with the tokens."""
    if given is not None:
        return _read(given)
    for folder, _ in described:
        if (folder / "tokenizer.json").is_file():
            return _read(folder)
    return None


@lru_cache(maxsize=1)
def _read(path: Path) -> Tokenizer:
    return Tokenizer(path)  # only once: it has hundreds of thousands of tokens


def evaluation(loss: float, targets: int, text_bytes: int, unit: str) -> tuple[str, dict[str, Any]]:
    """Format a validation result as a sentence and as a metrics dictionary.

    Parameters
    ----------
    loss : float
        Mean nats per target.
    targets : int
        Number of targets in the mean loss.
    text_bytes : int
        Bytes of text that the targets represent; 0 if unknown.
    unit : str
        "byte" or "token".
    """
    perplexity = math.exp(min(loss, 700.0))
    record: dict[str, Any] = {"val_loss": loss, "val_tokens": targets}
    said = f"validation loss {loss:.4f} nats per {unit}"
    if text_bytes:
        bits = loss * targets / text_bytes / math.log(2)
        record["val_bits_per_byte"] = bits
        said += f", {bits:.3f} bits{' per byte' if unit != 'byte' else ''}"
    return said, {**record, "val_perplexity": perplexity}
