"""The lock with which a run claims a folder, and the removal of leftover files.

The lock is a POSIX file lock. The operating system releases it when the process ends. Forked
children do not inherit it, and it works across hosts if the file system supports that (NFS with
locks). The lock belongs to the process, which releases it by closing any descriptor of the file. A
process therefore never reopens a claimed file; all its claims on a file share one object.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import sys
import time
import weakref
from pathlib import Path

from fsdpc import distributed
from fsdpc.distributed.agree import agreed, gather_bytes

PATIENCE_S = 5.0  # for a network file system to show a new file
_OWNER = re.compile(rb"process \d+ on \S+ \(.*\)", re.DOTALL)  # the text that a claim writes
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks


class Claim:
    """A lock on an open file, held until the object or the process ends; see :func:`claim`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path: Path = path
        self.fd: int = fd
        self.pid: int = os.getpid()
        self.release: weakref.finalize[..., Claim] = weakref.finalize(
            self, _release, str(path), fd, self.pid
        )

    def is_held(self) -> bool:
        """Whether this process still holds the lock and its file still exists."""
        return self.release.alive and self.pid == os.getpid() and _is_at(self.fd, self.path)


_claims: weakref.WeakValueDictionary[Path, Claim] = weakref.WeakValueDictionary()


def claim(path: Path, folder: Path) -> Claim:
    """Create and lock a file that claims ``folder``; the file is removed when the claim ends.

    Raises
    ------
    BlockingIOError
        Another process holds it; the message names the process and the folder.
    OSError
        The file cannot be created.
    """
    path = path.parent.resolve() / path.name
    mine = _claims.get(path)
    if mine is not None and mine.is_held():
        return mine
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):  # otherwise its owner has just removed it
                os.ftruncate(fd, 0)
                owner = f"process {os.getpid()} on {socket.gethostname()} ({_program()})"
                os.pwrite(fd, owner.encode("utf-8", "backslashreplace"), 0)
                break
        except OSError as error:
            if error.errno in _NO_LOCKS:
                break
            owner = os.pread(fd, 512, 0).decode("utf-8", "replace") or "another process"
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise BlockingIOError(
                f"{folder} belongs to another run: {owner} saves there; wait until it ends or "
                "stop it, or choose another folder"
            ) from None
        os.close(fd)
    _claims[path] = own = Claim(path, fd)
    return own


def _program() -> str:
    """Return the running program's name, as a user would type it."""
    return os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable)


def _is_at(fd: int, path: str | Path) -> bool:
    """Return whether this name refers to the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _release(path: str, fd: int, pid: int) -> None:
    """Remove the file while it is locked; a forked child, which has no lock, removes nothing."""
    with contextlib.suppress(OSError):
        if pid == os.getpid() and _is_at(fd, path):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(fd)


def claim_name(path: Path) -> Claim:
    """Claim a checkpoint's name for one save; create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return claim(path.with_name(f".{path.name}.lock"), path)


def remove_remains(parent: Path) -> None:
    """Remove files left behind by killed saves from a folder."""
    for file in list(parent.glob(".?*.lock")):
        if not _is_left_behind(file):
            continue
        name = file.name[1 : -len(".lock")]
        with contextlib.suppress(OSError):  # another save may have begun
            saver = claim_name(parent / name)
            for state in ("saving", "removing"):
                shutil.rmtree(parent / f".{name}.{state}", ignore_errors=True)
            saver.release()


def _is_left_behind(file: Path) -> bool:
    """Return whether a dead process left this claim file behind; our own locks are kept."""
    mine = _claims.get(file.parent.resolve() / file.name)
    if mine is not None and mine.is_held():
        return False
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if _OWNER.fullmatch(os.pread(fd, 512, 0)) is None:  # another program's file
            return False
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or locks are unavailable
        return False
    finally:
        os.close(fd)
    return True


def check_shared(path: Path, claim: Claim | None) -> None:
    """Raise if the hosts do not share a folder; collective, before anything is saved.

    Rank 0 has claimed the checkpoint's name by creating a file that all hosts must see.

    Raises
    ------
    OSError
        Raised on every rank: a host has a separate folder at this path.
    """
    world = distributed.world()
    if world.hosts <= 1:
        return
    told = gather_bytes(world, os.pread(claim.fd, 512, 0) if claim is not None else b"")[0]
    file = path.with_name(f".{path.name}.lock")
    agreed(lambda: _find(file, told) if claim is None else None)  # reopening drops the lock


def _find(file: Path, text: bytes) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # refreshes the client's view of the server
            if file.read_bytes() == text:
                return
        if time.monotonic() > end:
            raise OSError(
                f"{file.parent} is another folder on {socket.gethostname()} than on rank 0's host: "
                "ranks of several hosts save to one folder that all of them see"
            )
        time.sleep(0.1)


def claim_folder(folder: Path) -> Claim:
    """Create and claim a checkpoint folder; remove files left behind by killed saves."""
    folder.mkdir(parents=True, exist_ok=True)
    own = claim(folder / ".lock", folder)
    for entry in list(folder.glob(".step-*")):
        _, name, state = entry.name.rsplit(".", 2) if entry.name.count(".") == 2 else ("", "", "")
        if not name[5:].isdecimal() or state not in ("saving", "removing", "lock"):
            continue
        with contextlib.suppress(BlockingIOError):  # a save() in progress holds it
            saver = claim_name(folder / name)
            if state != "lock":
                shutil.rmtree(entry)
            saver.release()
    return own
