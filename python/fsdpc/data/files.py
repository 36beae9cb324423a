"""Find and open data files; errors name the file and the reason."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

PathLike = str | os.PathLike[str]


def default_corpus() -> list[Path]:
    """Return the sorted .py files of this Python's standard library, about 12 MB of text.

    The library's tests and third-party packages are excluded.

    Raises
    ------
    FileNotFoundError
        This Python's standard library does not consist of plain files.

    Examples
    --------
    >>> from fsdpc import data
    >>> files = data.default_corpus()
    >>> files == sorted(files), files[0].suffix
    (True, '.py')
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in left_out]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise FileNotFoundError(f"{library} holds no .py files: give --data, files or folders")
    return sorted(files, key=lambda path: path.relative_to(library).parts)


class explained:
    """Prefix system errors with the data file's name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            text = f"cannot read data file {self.path}: {error.strerror or error}"
            raise type(error)(text) from error


def find_files(paths: PathLike | Sequence[PathLike], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the non-empty files that these paths refer to."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise ValueError("no data: give at least one file or folder")
    files: list[Path] = []
    for path in map(Path, given):
        with explained(path):
            status = path.stat()
        if path.is_dir():
            found = _walk(path, suffixes)
            if not found:
                kinds = f" {' or '.join(suffixes)}" if suffixes else ""
                raise ValueError(f"data folder {path} holds no{kinds} files that are not empty")
            files += found
        elif not S_ISREG(status.st_mode):
            raise ValueError(f"data path {path} is neither a file nor a folder")
        elif status.st_size == 0:
            raise ValueError(f"data file {path} is empty")
        else:
            files.append(path)
    return files


# Maps the signatures of binary files to their types.
_MAGIC = (
    (b"\x93NUMPY", "a NumPy array"),
    (b"PK\x03\x04", "a zip archive (.npz, .pt, .docx)"),
    (b"\x1f\x8b", "a gzip file"),
    (b"%PDF", "a PDF"),
    *((bytes([0x80, version]), "a pickle") for version in range(2, 6)),
)
_HEAD_BYTES = 1 << 16  # bytes to check in each file


def refuse_binary(paths: PathLike | Sequence[PathLike]) -> None:
    """Raise ValueError for the first of these files that is binary."""
    for path in find_files(paths, ()):
        with explained(path), open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
        kind = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
        if head[8:10] == b'{"':
            kind = kind or "a safetensors file"
        if kind or b"\0" in head:
            raise ValueError(
                f"data file {path} is {kind or 'binary (it holds NUL bytes)'}, and training takes "
                "text, UTF-8 or the like: leave it out, or name the files that are text; token "
                "files (.npy, .bin) need a tokens.json next to them, or a script with "
                "fsdpc.data.TokenDataset"
            )


def _walk(top: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files = []

    def refuse(error: OSError) -> None:
        raise type(error)(f"cannot read data folder {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(top, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or (suffixes and not name.endswith(suffixes)):
                continue
            with explained(path):
                status = path.stat()
            if S_ISREG(status.st_mode) and status.st_size:
                files.append(path)
    return sorted(files, key=lambda path: path.relative_to(top).parts)


def map_tokens(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """Memory-map a token file and return its ids; `dtype` applies only to .bin files."""
    if path.suffix == ".npy":
        return _map_token_npy(path)
    if path.suffix != ".bin":
        raise ValueError(f"token file {path} is neither .npy nor .bin")
    with explained(path):
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise ValueError(f"token file {path}: {size} bytes are no whole number of {dtype}")
        return np.memmap(path, dtype, "r")


def map_npy(path: Path, kind: str = "data") -> np.ndarray:
    """Memory-map a .npy file and return its array."""
    try:
        with explained(path):
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{kind} file {path} is not a valid .npy file: {error}") from error


def _map_token_npy(path: Path) -> np.ndarray:
    ids = map_npy(path, "token")
    if ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32):
        raise ValueError(
            f"token file {path} holds {ids.dtype} of shape {ids.shape}; needed are 1-D uint16 or "
            "uint32"
        )
    if len(ids) == 0:
        raise ValueError(f"token file {path} holds no tokens")
    return ids


def describe(files: list[Path]) -> str:
    """Describe these files briefly, for use in messages."""
    return str(files[0]) if len(files) == 1 else f"{len(files)} files from {files[0]} on"
