"""Arrays whose rows are training items, held in memory or memory-mapped from .npy files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsdpc.data.files import PathLike, map_npy

Batch = tuple[np.ndarray, ...]


class ArrayDataset:
    """A dataset of parallel arrays; item i contains row i of each array.

    Parameters
    ----------
    *arrays : numpy.ndarray or path
        Arrays of shape (rows, ...), or ``.npy`` files with such arrays, which are mapped, not read.
        Dtypes: 16, 32 or 64-bit floats, integers and bools. All must have the same number of rows.

    Raises
    ------
    ValueError
        An array has an unsupported dtype or no rows, or its number of rows differs from the
        first's; the message names it.
    FileNotFoundError, PermissionError
        A file is missing or unreadable.

    Notes
    -----
    A :class:`Loader` returns floats unchanged, and integers and bools in its own dtype.

    Examples
    --------
    >>> data = ArrayDataset(np.eye(3, dtype=np.float32), np.array([7, 8, 9], np.uint8))
    >>> x, y = data.batch([2, 0])
    >>> x.tolist(), y.tolist(), y.dtype.name
    ([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], [9, 7], 'int64')
    """

    def __init__(self, *arrays: np.ndarray | PathLike) -> None:
        if not arrays:
            raise ValueError("no arrays: give at least one, or the path of a .npy file")
        self._arrays: list[np.ndarray] = []
        self._names: list[str] = []
        for index, given in enumerate(arrays):
            is_path = isinstance(given, (str, os.PathLike))
            name = f"data file {given}" if is_path else f"array {index}"
            array = map_npy(Path(given)) if is_path else np.asarray(given)
            _check(name, array)
            if len(array) != len(self._arrays[0] if self._arrays else array):
                raise ValueError(
                    f"{name} has {len(array)} rows, {self._names[0]} has {len(self._arrays[0])}: "
                    "an item is a row of each"
                )
            self._arrays.append(array)
            self._names.append(name)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> Batch:
        """Return row `index` of each array, converting integers to int64."""
        return tuple(rows[0] for rows in self.batch([index]))

    def batch(self, indices: Sequence[int], dtype: npt.DTypeLike = np.int64) -> Batch:
        """Return the rows at these indices from each array.

        Parameters
        ----------
        indices : sequence of int
            Row indices; rows are returned in this order.
        dtype : numpy dtype
            Dtype to which integers and bools are converted, by default int64.

        Returns
        -------
        tuple of numpy.ndarray
            A copy for each array, of shape (len(indices), ...), C-contiguous.

        Raises
        ------
        IndexError
            An index is out of range.
        ValueError
            `dtype` cannot hold one of the numbers; the message names the array, row and number.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        beyond = chosen[(chosen < 0) | (chosen >= len(self))]
        if beyond.size:
            raise IndexError(f"{self._names[0]}: no row {beyond[0]}, there are {len(self)}")
        return tuple(
            _converted(name, np.asarray(array[chosen]), chosen, np.dtype(dtype))
            for name, array in zip(self._names, self._arrays)
        )


def _check(name: str, array: np.ndarray) -> None:
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "iubf" or (kind == "f" and size > 8):
        raise ValueError(
            f"{name} holds {array.dtype}; needed are floats of 16, 32 or 64 bits, integers or bools"
        )
    if array.ndim == 0 or len(array) == 0:
        raise ValueError(f"{name} of shape {array.shape} has no rows")


def _converted(
    name: str, rows: np.ndarray, chosen: np.ndarray, dtype: np.dtype[np.generic]
) -> np.ndarray:
    """Return the rows in native byte order, converting integers to `dtype`."""
    if rows.dtype.kind == "f":
        return np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
    if not np.can_cast(rows.dtype, dtype):
        limits = np.iinfo(dtype)
        wrong = (rows > limits.max) | (rows < limits.min)
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            raise ValueError(
                f"{name}: row {chosen[place[0]]} has {rows[place]}, which is no {dtype}: give "
                "another dtype"
            )
    return np.ascontiguousarray(rows, dtype)
