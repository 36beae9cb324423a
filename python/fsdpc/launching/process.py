"""One rank process, from the fork to its first own line.

Every rank is the leader of a process group of its own, so that ending a rank ends what it started
too.  Its stdout and stderr go down one pipe to the parent, in the order written; stdin is empty.

Note [leash]. A rank must not outlive its launcher, even one that is killed by SIGKILL.
PR_SET_PDEATHSIG follows the parent's thread (a notebook's worker thread may end) and spares the
rank's own children; a watching thread would make the rank's later forks unsafe. So each rank holds
the read end of a pipe whose only write end is the launcher's. It makes the kernel (O_ASYNC,
F_SETSIG, F_SETOWN) send SIGKILL to its process group when that end closes. It survives exec.
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

_parents_streams: list[object] = []  # kept from being closed with their descriptors
SAVES = {signal.SIGTERM, signal.SIGUSR1}  # that ranks may answer by saving
STOPS = {signal.SIGINT, *SAVES}


class Started(NamedTuple):
    """What the parent holds of a rank process it forked."""

    pid: int
    pidfd: int
    output: int
    result: int
    leash: int


def fill_standard_descriptors() -> list[int]:
    """Open the null device where stdin, stdout or stderr is closed; return what was opened.

    A pipe of ours that got such a number would be lost where a rank gets streams of its own.
    """
    filled = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        filled.append(fd)
    os.close(fd)
    return filled


def fork_rank(env: Mapping[str, str], body: Body, inherited: Iterable[int]) -> Started:
    """Fork a process that runs ``body(result_fd)`` and ends; returns the parent's side.

    Parameters
    ----------
    env : mapping of str to str
        Variables set on top of the parent's environment.
    body : callable
        Gets the descriptor for its result.  What it returns is ignored, an exception that leaves it
        is printed and makes the exit code 1, SystemExit gives its own.  STOPS are blocked when it
        begins: a child without handlers of its own would answer them as its launcher does.
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
            # Python 3.12 warns when the process has threads: NumPy's wait in BLAS and survive a
            # fork, ours and CUDA's were refused before we came here.
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
                os._exit(1)  # the stack above us is the parent's
        _run_and_exit(body, result_write)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for fd in (output_write, result_write, leash_read):
        os.close(fd)
    try:
        os.setpgid(pid, pid)  # in both processes, so that neither can be ahead of it
    except (PermissionError, ProcessLookupError):
        pass  # it has run exec, or ended, already
    for fd in (output_read, result_read):
        os.set_blocking(fd, False)
    return Started(pid, os.pidfd_open(pid), output_read, result_read, leash_write)


def _tie_to_parent(leash: int) -> None:
    """Have the kernel kill our group when the parent's end closes; see Note [leash]."""
    fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(leash, True)
    if select.select([leash], [], [], 0)[0]:
        os._exit(1)  # the parent died before the signal was armed


def _take_over(output: int, env: Mapping[str, str]) -> None:
    """Give the child streams, signals and an environment of its own."""
    # Where the parent was started without streams, those that it made may lie on our descriptors.
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
    # A timeout is answered with SIGABRT, at which faulthandler prints every thread's stack.  Where
    # it is on already (in pytest), enable() alone would not install its handlers again.
    faulthandler.disable()
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    enable_stacks()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ.update(env)
    os.close(output)


def enable_stacks() -> None:
    """Have Python's stacks printed when this process crashes.

    Python 3.14 would print C's behind them, which pushes them out of the last lines that are shown.
    """
    options = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(file=2, all_threads=True, **options)


def _line_stream(fd: int) -> io.TextIOWrapper:
    return open(fd, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace")


def _run_and_exit(body: Body, result: int) -> NoReturn:
    """Run the body and leave without the parent's exit handlers, which are not ours to run."""
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
