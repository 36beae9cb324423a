"""Make all ranks raise an error if one of them fails or if they disagree."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import numpy as np

from fsdpc import _core, distributed
from fsdpc._core import MismatchError

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

_BYTES = 1024  # per rank: one line each for kind, mark and text

#: Exceptions, besides Python's own, that the other ranks also raise, by name.
_KNOWN: dict[str, type[Exception]] = {}


def raised_together(kind: type[E]) -> type[E]:
    """Make the other ranks raise this exception class too, not RuntimeError (a decorator)."""
    _KNOWN[kind.__name__] = kind
    return kind


def agreed(work: Callable[[], T]) -> T:
    """Return ``work()``, or raise on all ranks if it raises on any (collective)."""
    error: BaseException | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    agree(error)
    return result


def agree(error: BaseException | None, mark: int = 0, what: str = "a checkpoint") -> None:
    """Raise an error on all ranks if any rank passes one (collective).

    Parameters
    ----------
    error : BaseException, optional
        This rank's error, if any.
    mark : int, default 0
        A number that must be equal on all ranks, such as a checksum of their next operation.
    what : str
        Description of the mark, for the message if marks differ.

    Raises
    ------
    the error itself
        On the rank with the error.
    the same built-in kind, else RuntimeError
        On the other ranks, with the lowest failing rank and its message.
    MismatchError
        No rank failed, but the marks differ.
    """
    comm = distributed.world()
    if comm.size == 1:
        if error is not None:
            raise error
        return
    kind = type(error).__name__ if error is not None else ""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error or "")
    word = f"{kind}\n{mark}\n{text}".encode("utf-8", "backslashreplace")  # paths may be any bytes
    word = word[:_BYTES].ljust(_BYTES, b"\0")
    rows = comm.all_gather(_core.tensor(np.frombuffer(word, np.uint8))).numpy()
    words = [bytes(r).rstrip(b"\0").decode("utf-8", "replace").split("\n", 2) for r in rows]
    if error is not None:
        raise error
    for rank, (other, _, reason) in enumerate(words):
        if other:
            raise _exception(other)(f"rank {rank}: {reason}")
    for rank, (_, other, _) in enumerate(words):
        if other != words[0][1]:
            raise MismatchError(
                f"ranks disagree on {what}: rank {rank} has another list of tensors, shapes and "
                "dtypes than rank 0; give the same model and options on every rank"
            )


def gather_bytes(comm: _core.Comm, data: bytes) -> list[bytes]:
    """Return every rank's bytes, which may differ in length (collective)."""
    lengths = comm.all_gather(_core.tensor(np.array([len(data)]))).numpy().ravel().tolist()
    padded = np.frombuffer(data.ljust(max(1, *lengths), b"\0"), np.uint8)
    rows = comm.all_gather(_core.tensor(padded)).numpy()
    return [bytes(row[:n]) for row, n in zip(rows, lengths, strict=True)]


def _exception(name: str) -> type[Exception]:
    found = getattr(builtins, name, RuntimeError)
    if name in _KNOWN:
        return _KNOWN[name]
    fine = isinstance(found, type) and issubclass(found, Exception)
    return found if fine and not issubclass(found, UnicodeError) else RuntimeError


def check_agreement(
    lines: list[str],
    comms: Sequence[_core.Comm],
    cure: str = "build and shard the same model, with the same seed, on every rank",
) -> None:
    """Compare what the ranks are about to shard; all ranks report the same difference.

    If the mesh spans the whole world, all ranks compare at once; otherwise they compare first
    within rows, then within columns.
    """
    world = distributed.world() if distributed.is_initialized() else None
    if world is not None and world.size == prod(comm.size for comm in comms):
        comms = [world]
    for comm in comms:
        if comm.size > 1:
            _agree(lines, comm, cure)


def _agree(lines: list[str], comm: _core.Comm, cure: str) -> None:
    text = "\n".join(lines).encode()
    mine = np.array([_core.crc32c(0, text), len(text)], dtype=np.int64)
    marks = comm.all_gather(_core.tensor(mine)).numpy()
    if (marks == marks[0]).all():
        return
    texts = [each.decode().split("\n") for each in gather_bytes(comm, text)]
    for other in range(1, comm.size):
        for i in range(max(len(texts[0]), len(texts[other]))):
            a = texts[0][i] if i < len(texts[0]) else "nothing more"
            b = texts[other][i] if i < len(texts[other]) else "nothing more"
            if a != b:
                raise MismatchError(
                    f"fully_shard: ranks disagree on the model: rank 0 has [{a}], rank {other} has "
                    f"[{b}]; {cure}"
                )
