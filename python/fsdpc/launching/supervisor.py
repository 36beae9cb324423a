"""Supervise the rank processes of one run until all have ended.

One loop in the calling thread waits for all ranks' output, results and exits. The rules:

- a rank fails if it exits with a nonzero code or is killed by a signal;
- when the first rank fails, the others have `grace` seconds to report what they saw, then their
  process groups are killed; a stopped rank (SIGSTOP) cannot report and is killed at once;
- a rank's exit is recorded in a page that all ranks can read, for ranks still waiting to meet it
  (later, ranks watch each other);
- at the timeout every rank still running gets SIGABRT, on which it prints its stacks and ends;
- a stop (Ctrl-C, SIGTERM, SIGUSR1) is forwarded to all groups, which are killed after `grace`; a
  second Ctrl-C kills at once;
- ranks that catch SIGTERM or SIGUSR1 have unlimited time to save: `grace` begins when the first of
  them ends, or at a second SIGTERM. The signal is sent only to the rank process, because it would
  kill data loader workers.

The first rank to end is not always the one that failed *first*. A rank that dies with gigabytes of
memory ends only once they are freed, and peers that noticed its death may end before it. A rank
that reports a lost peer is therefore named as the first to fail only if no other rank failed.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fsdpc._core import listen_for_rank
from fsdpc.distributed.environment import process_stat, run_address
from fsdpc.launching.process import SAVES, Body, Started, fill_standard_descriptors, fork_rank

TAIL_LINES = 200
ABORT_S = 3.0  # to print stacks after SIGABRT
TICK_S = 0.5  # a signal handler may move a deadline while the loop sleeps
PENDING_BYTES = 1 << 16
NEWS = b"fsdpc news 1\n"  # FSDPC_RENDEZVOUS_NEWS of csrc/comm/rendezvous.h
PEER_MARK = "PeerError"
LINE = re.compile(r"[^\r\n]*[\r\n]|[^\r\n]+")


@dataclass
class Rank:
    """A rank's process, its last output, and how it ended."""

    rank: int
    started: Started
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    pending: bytearray = field(default_factory=bytearray)
    payload: bytearray = field(default_factory=bytearray)
    code: int | None = None  # as subprocess: negative is a signal
    ended_at: float = 0.0

    @property
    def running(self) -> bool:
        """Whether the process is still running, as far as the supervisor knows."""
        return self.code is None

    def ending(self) -> str:
        """A description of how the rank ended."""
        if self.code is None:
            return "still running"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


class CannotStart(OSError):
    """Raised if there are not enough processes, memory or descriptors to start a rank."""


class Supervisor:
    """Starts ranks in :meth:`start`, serves them in :meth:`watch`, and ends them in :meth:`close`.

    Parameters
    ----------
    write : callable
        Called with the ranks' output: whole lines, prefixed with the rank.
    timeout : float, optional
        Seconds from the start after which the ranks are aborted; by default never.
    grace : float
        Seconds that ranks have to end after a failure or a stop request.
    tick : callable, optional
        Called about twice a second.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        *,
        timeout: float | None = None,
        grace: float = 5.0,
        tick: Callable[[], object] | None = None,
    ) -> None:
        self.write = write
        self.grace = grace
        self.tick = tick
        self.ranks: list[Rank] = []
        self.timed_out = False
        self.killed: set[int] = set()
        self.stopped: set[int] = set()  # killed ranks that SIGSTOP had stopped, which get no grace
        self._timeout_at = None if timeout is None else time.monotonic() + timeout
        self._kill_at: float | None = None
        self._stopping: int | None = None  # the signal that requested it
        self._filled = fill_standard_descriptors()
        self._selector = selectors.DefaultSelector()
        self._news = os.memfd_create("fsdpc news")
        os.write(self._news, NEWS)

    def start(self, env: dict[str, str], body: Body) -> None:
        """Fork the next rank, which runs ``body(result_fd)``; may raise CannotStart."""
        inherited = [fd for rank in self.ranks for fd in self._descriptors(rank)]

        def informed(result: int) -> None:
            os.set_inheritable(self._news, True)  # a rank may run exec
            os.set_inheritable(listening, True)
            body(result)

        # Bound before the rank exists and closed here before the next fork: no other process can
        # take over the address, and no descriptor outlives the rank.
        address, _ = run_address({**os.environ, **env})
        listening = listen_for_rank(address, int(env["RANK"]))
        try:
            sockets = {"FSDPC_NEWS_FD": str(self._news), "FSDPC_RANK_SOCKET": str(listening)}
            started = fork_rank({**env, **sockets}, informed, [*inherited, self._selector.fileno()])
        except OSError as error:
            text = f"rank {len(self.ranks)} could not be started: {error.strerror}"
            raise CannotStart(error.errno, text) from error
        finally:
            os.close(listening)
        rank = Rank(len(self.ranks), started)
        self.ranks.append(rank)
        self._selector.register(started.pidfd, selectors.EVENT_READ, (rank, self._reap))
        self._selector.register(started.output, selectors.EVENT_READ, (rank, self._read_output))
        self._selector.register(started.result, selectors.EVENT_READ, (rank, self._read_result))
        if self._stopping is not None:  # requested before this rank was known
            os.killpg(started.pid, self._stopping)

    def watch(self) -> None:
        """Serve the ranks until all of them have ended."""
        ticked = time.monotonic()
        while any(rank.running for rank in self.ranks):
            self.serve()
            if self.tick and time.monotonic() - ticked >= TICK_S:
                self.tick()
                ticked = time.monotonic()

    def serve(self) -> None:
        """Process the ranks' messages, waiting at most half a second."""
        for key, _ in self._selector.select(self._patience()):
            rank, serve = key.data
            serve(rank)
        self._check_deadlines()

    def stop(self, signum: int) -> None:
        """Forward a signal to all ranks; kill those that do not end, as described at the top."""
        again = self._stopping not in (None, signal.SIGUSR1)
        if not again:
            self._stopping = signum
        saving = {
            rank.rank
            for rank in self.ranks
            if rank.running and signum in SAVES and _catches(rank.started.pid, signum)
        }
        self._signal_groups(signum, only=saving)
        if not saving or (again and signum != signal.SIGUSR1):
            patience = 0.0 if again and signum == signal.SIGINT else self.grace
            self._kill_within(patience)

    def _kill_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def close(self) -> None:
        """Kill running ranks, reap them and close every descriptor."""
        self._signal_groups(signal.SIGKILL)
        for rank in self.ranks:
            if rank.running:
                self._reap(rank)
            for fd in self._descriptors(rank):
                os.close(fd)
        self._selector.close()
        for fd in (self._news, *self._filled):
            os.close(fd)

    def first_failure(self) -> Rank | None:
        """Return the rank that failed first, as defined at the top of this module."""
        failed = [rank for rank in self.ranks if rank.code and rank.rank not in self.killed]
        return min(failed, key=lambda rank: (self._blames_peer(rank), rank.ended_at), default=None)

    @staticmethod
    def _blames_peer(rank: Rank) -> bool:
        last = next((line for line in reversed(rank.tail) if line.strip()), "")
        return PEER_MARK in last or PEER_MARK.encode() in rank.payload

    @staticmethod
    def _descriptors(rank: Rank) -> Sequence[int]:
        return rank.started[1:]

    def _patience(self) -> float:
        deadlines = [at for at in (self._timeout_at, self._kill_at) if at is not None]
        return min([TICK_S, *(max(0.0, at - time.monotonic()) for at in deadlines)])

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            self._kill_stopped()
        if self._kill_at is not None and now >= self._kill_at:
            self.killed.update(rank.rank for rank in self.ranks if rank.running)
            self._signal_groups(signal.SIGKILL)
        elif self._timeout_at is not None and now >= self._timeout_at:
            self.timed_out = any(rank.running for rank in self.ranks)
            self._timeout_at = None
            self._kill_at = now + ABORT_S
            for rank in self.ranks:
                if rank.running:
                    self.killed.add(rank.rank)
                    os.kill(rank.started.pid, signal.SIGABRT)

    def _kill_stopped(self) -> None:
        for rank in self.ranks:
            if not rank.running or rank.rank in self.stopped:
                continue
            if process_stat(rank.started.pid)[0] == "T":
                self.stopped.add(rank.rank)
                self.killed.add(rank.rank)
                os.killpg(rank.started.pid, signal.SIGKILL)

    def _signal_groups(self, signum: int, only: Collection[int] = ()) -> None:
        for rank in self.ranks:
            if rank.running:  # not reaped, so the group id is still valid
                try:
                    (os.kill if rank.rank in only else os.killpg)(rank.started.pid, signum)
                except ProcessLookupError:
                    pass

    def _reap(self, rank: Rank) -> None:
        """End the rank's process group; read its exit code and the remaining data in its pipes."""
        pid = rank.started.pid
        rank.code = 255  # if other code reaped it
        try:
            # Not reaped yet, so the group id is still ours when we kill the rank's remaining
            # processes (one of its children could otherwise keep the pipes open forever).
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            rank.ended_at = time.monotonic()
            os.killpg(pid, signal.SIGKILL)
            rank.code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except (ChildProcessError, ProcessLookupError):
            rank.ended_at = time.monotonic()
        os.write(self._news, f"rank {rank.rank} ended ({rank.ending()})\n".encode())
        self._forget(rank.started.pidfd)
        while self._read_output(rank):
            pass
        while self._read_result(rank):
            pass
        self._emit(rank, bytes(rank.pending))
        rank.pending.clear()
        for fd in (rank.started.output, rank.started.result):
            self._forget(fd)
        if rank.code != 0 or self._stopping is not None:
            self._kill_within(self.grace)

    def _forget(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _read(self, fd: int) -> bytes:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return b""
        if not chunk:
            self._forget(fd)
        return chunk

    def _read_result(self, rank: Rank) -> bool:
        chunk = self._read(rank.started.result)
        rank.payload += chunk
        return bool(chunk)

    def _read_output(self, rank: Rank) -> bool:
        chunk = self._read(rank.started.output)
        rank.pending += chunk
        # A carriage return also ends a line, because progress lines end in one.
        end = 1 + max(rank.pending.rfind(b"\n"), rank.pending.rfind(b"\r", 0, -1))
        if end == 0 and len(rank.pending) > PENDING_BYTES:
            end = len(rank.pending)
        self._emit(rank, bytes(rank.pending[:end]))
        del rank.pending[:end]
        return bool(chunk)

    def _emit(self, rank: Rank, text: bytes) -> None:
        if not text:
            return
        width = len(str(len(self.ranks) - 1))
        prefix = f"[{rank.rank:>{width}}] "
        lines = text.decode("utf-8", "replace").replace("\r\n", "\n")
        pieces = []
        for line in LINE.findall(lines):
            if not line.endswith(("\n", "\r")):
                line += "\n"
            rank.tail.append(line.rstrip("\r\n"))
            pieces.append(prefix + line)
        self.write("".join(pieces))


def _catches(pid: int, signum: int) -> bool:
    """Return whether the process has installed a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            caught = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) >> (signum - 1) & 1)
