"""Datasets that split one long stream of ids into sequences.

Item i is a pair (x, y) of ``seq_len`` ids each. y is x shifted by one id, so every id in the run
except the first is predicted once. Files are read in sorted order, so every rank sees the same
stream.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fsdpc.data.files import PathLike, describe, explained, find_files

Batch = tuple[np.ndarray, np.ndarray]

_MAPPED_BYTES = 1 << 20  # larger files are mapped, smaller ones are read and joined


class SequenceDataset:
    """A stream of ids split into sequences; the base class of all datasets in this module.

    Parameters
    ----------
    pieces : sequence of numpy.ndarray
        1-D arrays of unsigned integers to concatenate. They are referenced, not copied.
    seq_len : int
        Ids per sequence.
    name : str
        Name of the data, used in messages.

    Raises
    ------
    ValueError
        `seq_len` is below 1, or there are fewer ids than ``seq_len + 1``.

    Examples
    --------
    >>> import numpy as np
    >>> from fsdpc import data
    >>> rows = data.SequenceDataset([np.arange(9)], seq_len=4)
    >>> len(rows), [ids.tolist() for ids in rows[1]]
    (2, [[4, 5, 6, 7], [5, 6, 7, 8]])
    """

    def __init__(self, pieces: Sequence[np.ndarray], seq_len: int, name: str = "data") -> None:
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)])
        self._pieces = list(pieces)
        self._starts = starts.tolist()
        self.name = name
        self._set_range(0, self._starts[-1], seq_len)

    def _set_range(self, begin: int, end: int, seq_len: int) -> None:
        if isinstance(seq_len, bool) or not isinstance(seq_len, (int, np.integer)) or seq_len < 1:
            raise ValueError(f"seq_len must be a whole number of at least 1, got {seq_len!r}")
        if end - begin < seq_len + 1:
            raise ValueError(
                f"{self.name}: {end - begin} tokens are fewer than one sequence needs "
                f"({seq_len} + 1 for the last target)"
            )
        self._begin, self._end = begin, end
        self.seq_len: int = seq_len

    @property
    def tokens(self) -> int:
        """The number of ids in the stream."""
        return self._end - self._begin

    def __len__(self) -> int:
        """Return the number of sequences; leftover ids at the end are dropped."""
        return (self.tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> Batch:
        """Return one sequence as a pair (x, y) of int64 arrays of shape (seq_len,)."""
        x, y = self.batch([index])
        return x[0], y[0]

    def batch(self, indices: Sequence[int], dtype: npt.DTypeLike = np.int64) -> Batch:
        """Return several sequences.

        Parameters
        ----------
        indices : sequence of int
            Sequence indices; sequences are returned in this order.
        dtype : numpy dtype
            Dtype of the result; by default int64.

        Returns
        -------
        x, y : numpy.ndarray
            Ids and their successors, of shape (len(indices), seq_len), C-contiguous.

        Raises
        ------
        IndexError
            An index is out of range.
        """
        x = np.empty((len(indices), self.seq_len), dtype)
        y = np.empty_like(x)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"{self.name}: no sequence {index}, there are {len(self)}")
            ids = self.run(index * self.seq_len, self.seq_len + 1)
            x[row], y[row] = ids[:-1], ids[1:]
        return x, y

    def run(self, begin: int, count: int) -> np.ndarray:
        """Return `count` ids starting at position `begin`, joining pieces if necessary."""
        begin += self._begin
        end = begin + count
        parts = []
        piece = bisect_right(self._starts, begin) - 1
        while begin < end:
            offset = begin - self._starts[piece]
            part = self._pieces[piece][offset : offset + end - begin]
            parts.append(part)
            begin += len(part)
            piece += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def split(self, held_out: int) -> tuple[SequenceDataset, SequenceDataset]:
        """Split off the last ids as a second dataset that shares the same memory.

        Parameters
        ----------
        held_out : int
            Number of ids in the second dataset.

        Raises
        ------
        ValueError
            One of the two would be shorter than a sequence.
        """
        cut = self._end - held_out
        return (
            self._part(self._begin, cut, f"{self.name} (training part)"),
            self._part(cut, self._end, f"{self.name} (held out)"),
        )

    def _part(self, begin: int, end: int, name: str) -> SequenceDataset:
        part = copy.copy(self)
        part.name = name
        part._set_range(begin, end, self.seq_len)
        return part


class ByteDataset(SequenceDataset):
    """A dataset of the bytes in files, as ids from 0 to 255.

    Parameters
    ----------
    paths : path or sequence of paths
        Files and folders. A folder stands for every file below it, sorted by path, except names
        that begin with a dot; links to folders are not followed.
    seq_len : int
        Bytes per sequence.
    suffixes : sequence of str, optional
        Use only the files in folders that have these suffixes, such as ``[".py"]``; by default all.

    Raises
    ------
    FileNotFoundError, PermissionError, ValueError
        A path is missing, unreadable, empty, or not a file or folder, or all data together are
        shorter than a sequence; the message names the path.

    Notes
    -----
    Large files are mapped, so ranks on one host share their memory.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tempfile
    >>> from fsdpc import data
    >>> folder = tempfile.TemporaryDirectory()
    >>> size = Path(folder.name, "text.txt").write_text("hello world")
    >>> text = data.ByteDataset(folder.name, seq_len=4)
    >>> len(text), bytes(text[0][0].tolist())
    (2, b'hell')
    """

    def __init__(
        self, paths: PathLike | Sequence[PathLike], seq_len: int, suffixes: Sequence[str] = ()
    ) -> None:
        files = find_files(paths, tuple(suffixes))
        pieces: list[np.ndarray] = []
        small: list[bytes] = []
        for path in files:
            with explained(path):
                if path.stat().st_size >= _MAPPED_BYTES:
                    _join(small, pieces)
                    pieces.append(np.memmap(path, np.uint8, "r"))
                else:
                    small.append(path.read_bytes())
        _join(small, pieces)
        super().__init__(pieces, seq_len, describe(files))


class PackedSequences(SequenceDataset):
    """Documents that are concatenated and split into sequences, without padding.

    Parameters
    ----------
    documents : iterable of sequence of int
        Each document's ids; empty documents are dropped.
    seq_len : int
        Ids per sequence.
    separator : int, optional
        An id to append to every document.
    ignore_index : int, optional
        Target at positions whose next id belongs to another document, so that the loss does not
        include predicting how the next document begins.

    Raises
    ------
    ValueError
        All documents together are shorter than a sequence.

    Examples
    --------
    >>> from fsdpc import data
    >>> rows = data.PackedSequences([[1, 2, 3], [4, 5]], seq_len=3, separator=0)
    >>> len(rows), [ids.tolist() for ids in rows[0]]
    (2, [[1, 2, 3], [2, 3, 0]])
    """

    def __init__(
        self,
        documents: Iterable[Sequence[int] | np.ndarray],
        seq_len: int,
        separator: int | None = None,
        ignore_index: int | None = None,
    ) -> None:
        tail = np.array([] if separator is None else [separator], np.uint32)
        pieces = [np.append(np.asarray(ids, np.uint32), tail) for ids in documents if len(ids)]
        joined = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        super().__init__([joined], seq_len, "packed documents")
        self._firsts = np.cumsum([len(piece) for piece in pieces])  # start of the next document
        self._ignore_index = ignore_index

    def batch(self, indices: Sequence[int], dtype: npt.DTypeLike = np.int64) -> Batch:
        """Return several sequences; see :meth:`SequenceDataset.batch`."""
        x, y = super().batch(indices, dtype)
        if self._ignore_index is not None:
            for row, index in enumerate(indices):
                begin = self._begin + index * self.seq_len + 1  # position of the first target
                low, high = np.searchsorted(self._firsts, [begin, begin + self.seq_len])
                y[row, self._firsts[low:high] - begin] = self._ignore_index
        return x, y


def _join(small: list[bytes], pieces: list[np.ndarray]) -> None:
    """Concatenate small files and append them as one additional piece."""
    if small:
        pieces.append(np.frombuffer(b"".join(small), np.uint8))
        small.clear()
