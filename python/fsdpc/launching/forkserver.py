"""A single-threaded process that forks ranks for tests.

A pytest process soon has threads that do not survive a fork, from its own engine at world size 1
and from torch's OpenMP pool. The server is therefore forked after collection, before any test runs.
By then all modules are imported and all test functions are known, so no function needs to be
pickled. Requests arrive over an inherited socket, and the server answers with the outcome.

The server leads its own process group and is tied to pytest in the same way as ranks are to a
launcher (see Note [leash] in process.py). The server and its ranks therefore end with pytest.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from fsdpc.launching.forked import Outcome, Report, run_forked
from fsdpc.launching.process import STOPS, Started, fork_rank


class Job(NamedTuple):
    """A test to run: its function, numbers of ranks and hosts, fixtures, and working directory."""

    name: str
    ranks: int
    timeout: float
    init: bool
    hosts: int
    arguments: dict[str, object]
    environment: dict[str, str]
    folder: str


Call = Callable[[Job], Report]


class ForkServer:
    """The parent's handle to the server process, which runs :func:`_serve`.

    The server runs ``call(job)`` on every rank; the return value becomes the rank's report.
    """

    def __init__(self, call: Call) -> None:
        self._socket, theirs = socket.socketpair()
        mine = self._socket.fileno()
        self._started: Started = fork_rank({}, lambda _: _serve(theirs, call), [mine])
        self._output = os.fdopen(os.dup(self._started.output), "rb", buffering=0)
        theirs.close()

    def run(self, job: Job) -> tuple[str, Outcome]:
        """Run one job; return its ranks' output and how they ended.

        Raises
        ------
        TypeError
            An argument cannot be pickled.
        RuntimeError
            The server has died.
        """
        _send(self._socket, _pickle_job(job))
        try:
            answer = _receive(self._socket)
        except KeyboardInterrupt:
            os.kill(self._started.pid, signal.SIGINT)
            raise
        if answer is None:
            raise RuntimeError(f"the fork server of the ranks died\n{self._last_words()}")
        return pickle.loads(answer)

    def close(self) -> None:
        """Stop the server and wait for it to exit."""
        self._socket.close()
        try:
            os.waitpid(self._started.pid, 0)
        except ChildProcessError:
            pass
        self._output.close()
        for fd in self._started[1:]:
            os.close(fd)

    def _last_words(self) -> str:
        return (self._output.read() or b"").decode("utf-8", "replace")


def _pickle_job(job: Job) -> bytes:
    for name, value in job.arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the fixture {name!r} of type {type(value).__name__} cannot be handed to ranks by "
                f"value: {error}; make what it holds inside the test"
            ) from error
    return pickle.dumps(job)


def _serve(channel: socket.socket, call: Call) -> None:
    """Run jobs until the other end of the socket is closed."""
    gc.freeze()  # otherwise each rank's collections would copy all imported pages
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    while (request := _receive(channel)) is not None:
        job = pickle.loads(request)
        printed: list[str] = []
        os.chdir(job.folder)
        os.environ.clear()
        os.environ.update(job.environment)
        try:
            outcome = run_forked(
                functools.partial(call, job), job.ranks, printed.append, timeout=job.timeout
            )
        except KeyboardInterrupt:
            return
        _send(channel, pickle.dumps(("".join(printed), outcome)))


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(struct.pack("<Q", len(data)) + data)


def _receive(channel: socket.socket) -> bytes | None:
    """Return one message, or None if the other end has closed."""
    header = _receive_exactly(channel, 8)
    return header and _receive_exactly(channel, struct.unpack("<Q", header)[0])


def _receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = channel.recv(min(count - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
