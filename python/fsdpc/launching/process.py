"""A rank process, from the fork until its own code starts.

Every rank leads its own process group, so that ending a rank also ends its child processes. A
rank's stdout and stderr go through one pipe to the parent, in the order written; its stdin is
empty.

Note [leash]. A rank must not outlive its launcher, even if SIGKILL kills the launcher.
PR_SET_PDEATHSIG is tied to the parent's thread (a notebook's worker thread may end) and does not
reach the rank's own children. A watcher thread would make the rank's later forks unsafe. Each rank
therefore holds the read end of a pipe; only the launcher holds the write end. When that end closes,
the kernel sends SIGKILL to the rank's process group (O_ASYNC, F_SETSIG, F_SETOWN). This survives
exec.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import resource
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, NoReturn

Body = Callable[[int], object]

_parents_streams: list[object] = []  # kept so that their descriptors stay open
SAVES = {signal.SIGTERM, signal.SIGUSR1}  # ranks may save on these signals
STOPS = {signal.SIGINT, *SAVES}


class Started(NamedTuple):
    """The parent's record of a rank process that it forked."""

    pid: int
    pidfd: int
    output: int
    result: int
    leash: int


def fill_standard_descriptors() -> list[int]:
    """Open the null device for any closed standard stream; return the new descriptors.

    Otherwise a pipe could get one of these descriptors, which a rank closes when it sets up its own
    streams.
    """
    filled = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        filled.append(fd)
    os.close(fd)
    return filled


def fork_rank(env: Mapping[str, str], body: Body, inherited: Iterable[int]) -> Started:
    """Fork a process that runs ``body(result_fd)`` and exits; return the parent's record of it.

    Parameters
    ----------
    env : mapping of str to str
        Variables set in addition to the parent's environment.
    body : callable
        Called with the descriptor for its result. Its return value is ignored. An uncaught
        exception is printed and the exit code is 1; SystemExit sets its own code. STOPS are
        blocked when it begins, because a child without its own handlers would run its launcher's.
    inherited : iterable of int
        The parent's descriptors for other ranks, closed in the child.
    """
    pipes: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        for _ in range(3):
            pipes += os.pipe()
        for stream in filter(None, (sys.stdout, sys.stderr)):  # a daemon may have none
            stream.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns if a process with threads forks. NumPy's BLAS threads survive a
            # fork; engine and CUDA threads were ruled out earlier.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:
        for fd in pipes:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    output_read, output_write, result_read, result_write, leash_read, leash_write = pipes
    if pid == 0:
        try:
            os.setpgid(0, 0)
            for fd in (output_read, result_read, leash_write, *inherited):
                os.close(fd)
            _tie_to_parent(leash_read)
            _take_over(output_write, env)
        except BaseException as error:
            try:
                os.write(output_write, f"fsdpc: a rank could not start: {error!r}\n".encode())
            finally:
                os._exit(1)  # the stack above is the parent's
        _run_and_exit(body, result_write)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for fd in (output_write, result_write, leash_read):
        os.close(fd)
    try:
        os.setpgid(pid, pid)  # in both processes, so that the order does not matter
    except (PermissionError, ProcessLookupError):
        pass  # it has already run exec, or ended
    for fd in (output_read, result_read):
        os.set_blocking(fd, False)
    return Started(pid, os.pidfd_open(pid), output_read, result_read, leash_write)


def _tie_to_parent(leash: int) -> None:
    """Make the kernel kill our group when the parent's end closes; see Note [leash]."""
    fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(leash, True)
    if select.select([leash], [], [], 0)[0]:
        os._exit(1)  # the parent died before the signal was armed


def _take_over(output: int, env: Mapping[str, str]) -> None:
    """Give the child its own streams, signals and environment."""
    # If the parent had no standard streams, streams that it opened may use descriptors 0 to 2.
    _parents_streams.extend((sys.stdin, sys.stdout, sys.stderr))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # /dev/null
    sys.stdout = _line_stream(1)
    sys.stderr = _line_stream(2)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in SAVES:
        signal.signal(each, signal.SIG_DFL)
    # On a timeout, SIGABRT makes faulthandler print every thread's stack. If faulthandler is
    # already enabled (in pytest), enable() by itself would not reinstall its handlers.
    faulthandler.disable()
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    enable_stacks()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ.update(env)
    os.close(output)


def enable_stacks() -> None:
    """Print Python stacks if this process crashes.

    Python 3.14 would add C stacks, which push the Python stacks out of the last lines shown.
    """
    options = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(file=2, all_threads=True, **options)


def _line_stream(fd: int) -> io.TextIOWrapper:
    return open(fd, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")


def _run_and_exit(body: Body, result: int) -> NoReturn:
    """Run the body and exit without the parent's exit handlers."""
    code = 1
    try:
        body(result)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass
        os._exit(code & 0xFF)
