"""One answer on all ranks: what fails on one is raised on every one."""

from __future__ import annotations

import builtins

import numpy as np

from fsdpc import _core, distributed
from fsdpc._core import MismatchError

_BYTES = 1024  # of a rank's word: a line of kind, mark and text


def agree(error: BaseException | None, mark: int = 0, what: str = "a checkpoint") -> None:
    """Raise on all ranks what any of them has to raise; collective.

    Parameters
    ----------
    error : BaseException, optional
        What went wrong here, if anything did.
    mark : int, default 0
        A number that all ranks must have alike, a checksum of what they are about to do.
    what : str
        For the message where the marks differ.

    Raises
    ------
    the error itself
        On the rank that has it.
    the same built-in kind, else RuntimeError
        On the others, with the lowest failing rank and its text.
    MismatchError
        Nobody failed and the marks differ.
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


def _exception(name: str) -> type[Exception]:
    found = getattr(builtins, name, RuntimeError)
    if name == "CheckpointError":
        from fsdpc.checkpoint.manifest import CheckpointError

        return CheckpointError
    fine = isinstance(found, type) and issubclass(found, Exception)
    return found if fine and not issubclass(found, UnicodeError) else RuntimeError
