"""Training sequences from token files, which together form one stream of documents.

Files are memory-mapped, so ids are read from disk only when a batch needs them. Ids are checked
against the vocabulary at that point, because checking a large dataset in advance would take as long
as reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsdpc.data.datasets import Batch, SequenceDataset
from fsdpc.data.description import NAME, TokenDescription, check_shard, read_description
from fsdpc.data.files import PathLike, describe, find_files, map_tokens

_SCANNED = 1 << 22  # ids checked at a time


class TokenDataset(SequenceDataset):
    """A dataset of token ids from memory-mapped files, read as one stream.

    Parameters
    ----------
    paths : path or sequence of paths
        ``.npy`` files (1-D, uint16 or uint32), ``.bin`` files (raw ids), and folders. A folder
        stands for the shards listed in its ``tokens.json``, or all files of these two kinds below
        it, sorted by path.
    seq_len : int
        Tokens per sequence; the targets need one more, which is the next sequence's first token.
    dtype : numpy dtype, optional
        Dtype of ``.bin`` files, uint16 or uint32; by default from their ``tokens.json``, otherwise
        uint16.
    vocab_size : int, optional
        Upper bound of the ids; by default from ``tokens.json``, otherwise no limit.
    end_of_document : int, optional
        The id that ends every document; by default from ``tokens.json``, otherwise none.
    ignore_index : int, optional
        Target after each ``end_of_document``, so that the loss does not include predicting how the
        next document begins. Losses ignore -100. By default targets are unchanged.

    Raises
    ------
    FileNotFoundError, PermissionError, ValueError
        A path is missing, unreadable or empty, its kind, dtype or length differs from the
        description, or all data together are shorter than a sequence; the message names the path.

    Notes
    -----
    If an id is beyond the vocabulary, its batch raises ValueError. The message contains the file,
    the position and the id.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tempfile
    >>> import numpy as np
    >>> from fsdpc import data
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.arange(9, dtype=np.uint16).tofile(Path(folder.name, "ids.bin"))
    >>> tokens = data.TokenDataset(Path(folder.name, "ids.bin"), seq_len=4, dtype="uint16")
    >>> len(tokens), [ids.tolist() for ids in tokens[0]]
    (2, [[0, 1, 2, 3], [1, 2, 3, 4]])
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        seq_len: int,
        dtype: npt.DTypeLike | None = None,
        vocab_size: int | None = None,
        end_of_document: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        given = None if dtype is None else np.dtype(dtype)
        if given is not None and given not in (np.uint16, np.uint32):
            raise ValueError(f"tokens are uint16 or uint32, got dtype {given}")
        self.files: list[Path] = token_files(paths)
        folders = {path.parent: read_description(path.parent) for path in self.files}
        pieces = []
        for path in self.files:
            found = folders[path.parent]
            if given is not None and found and given != found.dtype and path.suffix == ".bin":
                raise ValueError(
                    f"{path.parent / NAME} says {found.dtype}, got dtype {given}: leave it out"
                )
            own = given or np.dtype(found.dtype if found else np.uint16)
            pieces.append(map_tokens(path, own))
            check_shard(path, pieces[-1], found)
        super().__init__(pieces, seq_len, describe(self.files))
        self.vocab_size: int | None = _common("vocab_size", vocab_size, folders)
        self.end_of_document: int | None = _common("end_of_document", end_of_document, folders)
        if ignore_index is not None and self.end_of_document is None:
            raise ValueError(
                f"{self.name}: ignore_index {ignore_index} needs end_of_document, the id that ends "
                "a document"
            )
        self.ignore_index = ignore_index

    def batch(self, indices: Sequence[int], dtype: npt.DTypeLike = np.int64) -> Batch:
        """Return several sequences; see :meth:`SequenceDataset.batch`.

        Raises
        ------
        ValueError
            An id is beyond the vocabulary.
        """
        x, y = super().batch(indices, dtype)
        limit = np.iinfo(dtype).max if self.vocab_size is None else self.vocab_size - 1
        for ids, ahead in ((x, 0), (y, 1)):
            if ids.size and (ids.min() < 0 or ids.max() > limit):
                row, column = np.argwhere((ids < 0) | (ids > limit))[0]
                self._refuse(indices[row] * self.seq_len + int(column) + ahead)
        if self.ignore_index is not None:
            y[x == self.end_of_document] = self.ignore_index
        return x, y

    def _refuse(self, position: int) -> None:
        """Raise ValueError for an invalid id at a position in the stream."""
        position += self._begin
        piece = int(np.searchsorted(self._starts, position, "right")) - 1
        inside = position - self._starts[piece]
        limit = "int32" if self.vocab_size is None else f"the vocabulary of {self.vocab_size:,}"
        raise ValueError(
            f"token file {self.files[piece]}: position {inside:,} has the id "
            f"{int(self._pieces[piece][inside])}, beyond {limit}: is it of another tokenizer, or "
            "another dtype?"
        )

    def document_starts(self) -> np.ndarray:
        """Return the stream positions at which documents begin, by reading the whole stream.

        Returns
        -------
        numpy.ndarray of int64, (documents,)
            Ascending, starting at 0.

        Raises
        ------
        ValueError
            No ``end_of_document`` is known.
        """
        if self.end_of_document is None:
            raise ValueError(f"{self.name}: no end_of_document was given, so no document ends")
        found = [np.zeros(1, np.int64)]
        for begin in range(0, self.tokens, _SCANNED):
            ids = self.run(begin, min(_SCANNED, self.tokens - begin))
            found.append(np.flatnonzero(ids == self.end_of_document) + begin + 1)
        starts = np.concatenate(found)
        return starts[starts < self.tokens]


def documents_in(x: np.ndarray, end_of_document: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's document index within its sequence, and its position in that document.

    Parameters
    ----------
    x : numpy.ndarray of int, (B, T)
        Sequences of packed documents.
    end_of_document : int
        The id that ends a document, which is its last token.

    Returns
    -------
    documents, positions : numpy.ndarray of int64, (B, T)
        Both count from 0; positions restart with each document. The first document counts from the
        sequence's beginning, even if it began earlier.

    Examples
    --------
    >>> documents, positions = documents_in(np.array([[5, 6, 0, 7, 0, 8]]), 0)
    >>> documents.tolist(), positions.tolist()
    ([[0, 0, 0, 1, 1, 2]], [[0, 1, 2, 0, 1, 0]])
    """
    begins = np.zeros(x.shape, bool)
    begins[:, 1:] = x[:, :-1] == end_of_document
    places = np.arange(x.shape[1])
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return np.cumsum(begins, axis=1, dtype=np.int64), (places - first).astype(np.int64)


def document_lengths(x: np.ndarray, end_of_document: int) -> list[int]:
    """Return the number of tokens in each packed document, sequence by sequence.

    Parameters
    ----------
    x : numpy.ndarray of int, (B, T)
        Sequences of packed documents.
    end_of_document : int
        The id that ends a document, which is its last token.

    Returns
    -------
    list of int
        Lengths as for :func:`fsdpc.functional.varlen_attention`: each sequence's add up to T.

    Examples
    --------
    >>> document_lengths(np.array([[5, 6, 0, 7], [8, 9, 1, 0]]), 0)
    [3, 1, 4]
    """
    ends = x == end_of_document
    ends[:, -1:] = True
    return np.diff(np.flatnonzero(ends), prepend=-1).tolist()


def token_files(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """Return the token files that these paths refer to, in order."""
    given = [paths] if not isinstance(paths, (list, tuple)) else paths
    files: list[Path] = []
    for path in map(Path, given):
        found = read_description(path) if path.is_dir() else None
        if found and found.shards:
            files += find_files([path / shard["file"] for shard in found.shards], ())
        else:
            files += find_files(path, (".npy", ".bin"))
    return files or find_files([], ())  # raises if there are no files


def _common(
    name: str, given: int | None, folders: dict[Path, TokenDescription | None]
) -> int | None:
    """Return the given value or, by default, the value that all descriptions share."""
    if given is not None:
        return given
    said = {folder: getattr(found, name) for folder, found in folders.items() if found}
    first = next(iter(said), None)
    for folder, value in said.items():
        if value != said[first]:
            raise ValueError(
                f"{first / NAME} has {name} {said[first]}, and {folder / NAME} {value}: tokens of "
                "two tokenizers are no one run"
            )
    return said.get(first)
