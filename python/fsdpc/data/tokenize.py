"""Convert text to token files in constant memory.

The output is written to a hidden folder next to its target and renamed when it is complete. A
killed run leaves behind only the hidden folder, which the next run removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from fsdpc import _core
from fsdpc.data.description import TokenDescription
from fsdpc.data.files import PathLike, explained, find_files, refuse_binary
from fsdpc.data.tokenizer import ENDS, Tokenizer, import_tokenizers

JSON_LINES = (".jsonl", ".ndjson")
_PIECE = 1 << 20  # maximum characters encoded as one text
_TOGETHER = 4096  # number of texts to encode together

Piece = tuple[str, bool]  # some text, and whether it ends its document


def tokenize(
    inputs: PathLike | Sequence[PathLike],
    tokenizer: Tokenizer,
    output: PathLike,
    *,
    field: str = "text",
    shard_tokens: int = 100_000_000,
    end_of_document: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> TokenDescription:
    """Tokenize text files into a folder for :class:`fsdpc.data.TokenDataset`.

    Parameters
    ----------
    inputs : path or sequence of paths
        UTF-8 text files with one document each; ``.jsonl`` and ``.ndjson`` files with one document
        per line; and folders of both. Empty documents are dropped.
    tokenizer : Tokenizer
        Ids are uint16 if its vocabulary is small enough, otherwise uint32.
    output : path
        The folder to create: ``shard-00000.bin`` and so on, ``tokens.json`` and ``tokenizer.json``.
    field : str, default "text"
        Name of the text field in a JSON line.
    shard_tokens : int, default 100,000,000
        Tokens per shard (the last may have fewer); documents may span shards.
    end_of_document : str, optional
        The token that ends each document; by default the result of :meth:`Tokenizer.find_end`.
    progress : callable, optional
        Called every few documents with the numbers of documents and tokens so far.

    Returns
    -------
    TokenDescription
        The content of ``tokens.json``.

    Raises
    ------
    FileExistsError
        `output` already exists.
    ValueError
        An input is not text, a line is not a JSON object with this field, there is no text at all,
        or another process is writing the same output. The message contains the file and line.
    OSError
        A file cannot be read or written.
    ImportError
        The tokenizers package is not installed.

    Notes
    -----
    Documents longer than 2^20 characters are encoded in pieces, which end at line ends if there are
    any. A tokenizer that adds a blank before each text also adds one before each piece.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    files = find_files(inputs, ())
    refuse_binary(files)
    end = tokenizer.find_end(end_of_document)
    with _Output(Path(output)) as folder:
        shards = _Shards(folder.hidden, np.dtype(tokenizer.dtype), shard_tokens)
        documents = text_bytes = 0
        for batch in _batches(_pieces(files, field)):
            encoded = tokenizer.encode([text for text, _ in batch])
            for (text, last), ids in zip(batch, encoded):
                if ids.size and int(ids.max()) >= tokenizer.vocab_size:
                    raise ValueError(
                        f"tokenizer {tokenizer.path} made the id {ids.max()}, and its vocabulary "
                        f"is {tokenizer.vocab_size}"
                    )
                shards.write(ids)
                text_bytes += len(text.encode())
                if last:
                    shards.write(np.array([end], np.uint32))
                    documents += 1
            if progress:
                progress(documents, shards.tokens)
        shards.close()
        if not documents:
            raise ValueError(f"{files[0]} and all other inputs hold no text")
        (folder.hidden / "tokenizer.json").write_bytes(tokenizer.data)
        description = TokenDescription(
            dtype=tokenizer.dtype, vocab_size=tokenizer.vocab_size, end_of_document=end,
            shards=tuple(shards.rows), documents=documents, text_bytes=text_bytes,
            tokenizer={"name": tokenizer.name, "sha256": tokenizer.sha256},
        )  # fmt: skip
        description.write(folder.hidden)
        folder.commit()
    return description


def encode_files(
    paths: Sequence[Path], tokenizer: Tokenizer, field: str = "text"
) -> list[np.ndarray]:
    """Tokenize text files in memory and return one array per document, including its end token.

    Parameters
    ----------
    paths, tokenizer, field
        As for :func:`tokenize`.

    Returns
    -------
    list of numpy.ndarray of uint16 or uint32, (tokens,)
    """
    end = np.array([tokenizer.find_end()], np.uint32)
    documents, parts = [], []
    for batch in _batches(_pieces(paths, field)):
        encoded = tokenizer.encode([text for text, _ in batch])
        for (_, last), ids in zip(batch, encoded):
            parts.append(ids)
            if last:
                documents.append(np.concatenate([*parts, end]).astype(tokenizer.dtype))
                parts = []
    return documents


def train_tokenizer(
    inputs: PathLike | Sequence[PathLike], vocab_size: int, field: str = "text"
) -> str:
    """Train a byte-level BPE tokenizer, and return the text of its ``tokenizer.json``.

    Parameters
    ----------
    inputs, field
        As for :func:`tokenize`.
    vocab_size : int
        Maximum number of tokens: ``<|endoftext|>``, the 256 bytes, and learned tokens.

    Raises
    ------
    ValueError
        `vocab_size` is below 257, or an input is not text.
    OSError
        A file cannot be read.
    ImportError
        The tokenizers package is not installed.

    Source: Sennrich et al. 2016 (BPE), Radford et al. 2019 (over bytes).
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size must be at least 257 (256 bytes and an end), got {vocab_size}"
        )
    files = find_files(inputs, ())
    refuse_binary(files)
    library = import_tokenizers("training a tokenizer")
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[ENDS[0]], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator((text for text, _ in _pieces(files, field)), trainer)
    return str(made.to_str(pretty=True))


# ---- reading


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into lists, each with about as many characters as the largest piece."""
    batch: list[Piece] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece[0])
        if held >= _PIECE or len(batch) == _TOGETHER:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _pieces(files: Sequence[Path], field: str) -> Iterator[Piece]:
    for path in files:
        if path.suffix in JSON_LINES:
            for text in _json_lines(path, field):
                yield from _cut(iter([text]))
        else:
            yield from _cut(_text(path))


def _text(path: Path) -> Iterator[str]:
    """Yield a file's text in chunks, preserving line endings."""
    taken = 0
    with explained(path), open(path, encoding="utf-8", newline="") as file:
        while True:
            try:
                part = file.read(_PIECE)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data file {path} is no UTF-8 text: {error.reason} after {taken:,} characters "
                    "or more; convert it, or leave it out"
                ) from None
            if not part:
                return
            taken += len(part)
            yield part


def _json_lines(path: Path, field: str) -> Iterator[str]:
    with explained(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"data file {path}, line {number}: no JSON: {error}") from None
            text = found.get(field) if isinstance(found, dict) else None
            if not isinstance(text, str):
                there = ", ".join(map(str, found)) if isinstance(found, dict) else "no object"
                raise ValueError(
                    f"data file {path}, line {number}: no text in '{field}' (there are: {there}): "
                    "name it with --field"
                )
            yield text.encode("utf-8", "replace").decode()  # JSON may contain lone surrogates


def _cut(parts: Iterator[str]) -> Iterator[Piece]:
    """Split a document at line ends; an empty document yields nothing."""
    held = ""
    for part in parts:
        held += part
        begin = 0
        while len(held) - begin > _PIECE:
            window = held[begin : begin + _PIECE]
            ends = [found.end() for found in re.finditer(r"\n(?=\S)", window)]
            cut = ends[-1] if ends else window.rfind("\n") + 1 or _PIECE
            yield window[:cut], False
            begin += cut
        held = held[begin:]
    if held:
        yield held, True


# ---- writing


class _Shards:
    """Writes token files with the same number of ids in each, except possibly the last."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], each: int) -> None:
        self.folder, self.dtype, self.each = folder, dtype, each
        self.rows: list[dict[str, Any]] = []
        self.tokens = 0
        self._file: BinaryIO | None = None
        self._inside = self._crc = 0

    def write(self, ids: np.ndarray) -> None:
        ids = ids.astype(self.dtype)
        while ids.size:
            if self._file is None:
                self._file = open(self.folder / f"shard-{len(self.rows):05}.bin", "wb")
                self._inside = self._crc = 0
            now, ids = np.split(ids, [self.each - self._inside])
            self._file.write(now.data)
            self._crc = _core.crc32c(self._crc, now)
            self._inside += now.size
            self.tokens += now.size
            if self._inside == self.each:
                self.close()

    def close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name
        self.rows.append({"file": name, "tokens": self._inside, "crc32c": f"{self._crc:08x}"})
        self._file = None


class _Output:
    """An output folder that does not appear until it is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        self.hidden = self.folder.with_name(f".{self.folder.name}.tokenizing")
        self.committed = False

    def __enter__(self) -> _Output:
        taken = self.folder.exists() or self.folder.is_symlink()
        if taken and not (self.folder.is_dir() and not any(self.folder.iterdir())):
            raise FileExistsError(f"{self.folder} is there already: name another --output folder")
        self.hidden.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.hidden, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock).st_ino != self.hidden.stat().st_ino:
                raise BlockingIOError  # the other process has just ended
        except (BlockingIOError, FileNotFoundError):
            os.close(self._lock)
            raise ValueError(f"another process is writing {self.folder}") from None
        self._clear()  # what a killed run left behind
        return self

    def _clear(self) -> None:
        for path in self.hidden.iterdir():
            path.unlink()

    def commit(self) -> None:
        """Rename the folder to its final name."""
        for name in ("tokens.json", "tokenizer.json"):
            with open(self.hidden / name, "rb") as file:
                os.fsync(file.fileno())
        os.fsync(self._lock)
        self.hidden.rename(self.folder)
        self.committed = True
        parent = os.open(self.folder.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.committed:
            with contextlib.suppress(OSError):  # the first error is the one raised
                shutil.rmtree(self.hidden)
        os.close(self._lock)
