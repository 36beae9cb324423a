"""Persistent ranks, which process requests one at a time until their launcher ends them.

The launcher serves them in the calling thread, and only during a request. Between requests it does
not read their output, and it does not notice a rank's death until the next call.

Note [stopping]. Ctrl-C sends SIGINT only to ranks that have reported the start of a request but not
its end. The signal therefore cannot arrive too early or hit the next request. If a rank does not
stop within ``STOP_S``, the caller ends all ranks. If a rank replies with an error, other ranks may
be waiting for it, so they are stopped after ``FAIL_S``.

Note [order]. A rank prints to a pipe and displays objects through its channel. Before displaying an
object, a rank flushes all printed text; then it waits until the object is displayed.
"""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from fsdpc.distributed.environment import rank_environments
from fsdpc.launching.channel import Channel, Message
from fsdpc.launching.supervisor import Rank, Supervisor

STOP_S = 5.0  # for a rank to respond to Ctrl-C
FAIL_S = 3.0  # for the other ranks, after one has failed
START_S = 120.0  # for ranks to import their modules, on a busy machine

Serve = Callable[[int], object]  # its argument is the descriptor of the rank's end of the channel


class Output(Protocol):
    """Receives the ranks' output."""

    def text(self, rank: int, text: str) -> None:
        """Receive text that a rank printed."""

    def show(self, rank: int, message: Message) -> None:
        """Receive an object that a rank displays."""

    def tick(self) -> None:
        """Called at least twice a second."""


class Silent:
    """Drops all output."""

    def text(self, rank: int, text: str) -> None: ...
    def show(self, rank: int, message: Message) -> None: ...
    def tick(self) -> None: ...


class Pool(Supervisor):
    """Ranks that run ``serve(fd)``.

    Raises
    ------
    CannotStart
        A rank could not be forked.
    RuntimeError
        A rank ended or was not ready within two minutes.
    """

    def __init__(self, ranks: int, serve: Serve, env: Mapping[str, str]) -> None:
        super().__init__(lambda _: None)
        self.stuck: list[int] = []  # ranks that did not respond to Ctrl-C
        self._channels: list[Channel] = []
        self._decoders: list[codecs.IncrementalDecoder] = []
        self._output: Output = Silent()
        self._waiting: set[int] = set()  # for a rank to be ready, or done
        self._begun: set[int] = set()
        self._asked: set[int] = set()  # asked to stop
        self._answers: dict[int, Message] = {}
        self._interrupted = False
        self._stop_at: float | None = None  # when running ranks get SIGINT
        try:
            for variables in rank_environments(ranks):
                self._start_one({**variables, **env}, serve)
            self._waiting = set(range(ranks))
            end = time.monotonic() + START_S
            while self._waiting:
                self.serve()
                self._drop_ended()
                if self.ended() or time.monotonic() > end:
                    raise RuntimeError(f"the ranks could not start: {self._why()}")
        except BaseException:
            self.close()
            raise

    def _start_one(self, env: dict[str, str], serve: Serve) -> None:
        ours, theirs = (each.detach() for each in socket.socketpair())
        self._channels.append(Channel(ours))
        self._decoders.append(codecs.getincrementaldecoder("utf-8")("replace"))

        def body(_: int) -> None:
            os.close(ours)
            serve(theirs)

        try:
            self.start(env, body)
        finally:
            os.close(theirs)
        rank = self.ranks[-1]
        self._selector.register(ours, selectors.EVENT_READ, (rank, self._hear))

    def _why(self) -> str:
        rank = next(iter(self.ended()), self.ranks[min(self._waiting, default=0)])
        lines = "".join(f"\n    {line}" for line in rank.tail)
        return f"rank {rank.rank} ({rank.ending()}); its last output:{lines or ' none'}"

    def ended(self) -> list[Rank]:
        """Return the ranks that have ended."""
        return [rank for rank in self.ranks if not rank.running]

    def look(self) -> list[Rank]:
        """Check for ranks that died since the last request; return all that have ended."""
        for key, _ in self._selector.select(0):
            rank, serve = key.data
            if key.fileobj == rank.started.pidfd:
                serve(rank)
        return self.ended()

    def ask(self, requests: Mapping[int, Message], output: Output) -> dict[int, Message]:
        """Send requests to ranks and wait for their answers; Ctrl-C interrupts the ranks.

        Returns
        -------
        dict
            Answers by rank. A rank that died or did not stop (`stuck`) has no answer.

        Raises
        ------
        KeyboardInterrupt
            Ctrl-C was pressed before the ranks had begun.
        """
        self._output, self._answers = output, {}
        self._interrupted, self._stop_at = False, None
        self._begun, self._asked = set(), set()
        for each in self.ranks:
            each.tail.clear()
            each.pending.clear()
        with self._stopping_on_interrupt():
            for rank, request in requests.items():
                try:
                    self._channels[rank].send(request)
                except ConnectionError:
                    pass  # the rank has ended
            self._waiting = set(requests)
            while self._waiting and not self.stuck:
                self.serve()
                output.tick()
                self._drop_ended()
                self._stop_those_begun()
            for rank in self.ranks:  # text after the last complete line
                if rank.running:
                    self._drain(rank)
        self._output = Silent()
        return self._answers

    def was_interrupted(self) -> bool:
        """Return whether Ctrl-C was pressed during the last request."""
        return self._interrupted

    @contextmanager
    def _stopping_on_interrupt(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(signum: int, frame: FrameType | None) -> None:
            self._interrupted = True
            self._stop_within(0.0)
            self._stop_those_begun()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _stop_within(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._stop_at = at if self._stop_at is None else min(at, self._stop_at)

    def _stop_those_begun(self) -> None:
        """See Note [stopping]."""
        if self._stop_at is None or time.monotonic() < self._stop_at:
            return
        for number in sorted(self._waiting & self._begun - self._asked):
            if self.ranks[number].running:
                self._asked.add(number)
                os.kill(self.ranks[number].started.pid, signal.SIGINT)
        if time.monotonic() > self._stop_at + STOP_S:
            self.stuck = sorted(self._waiting)

    def _drop_ended(self) -> None:
        self._waiting -= {rank.rank for rank in self.ended()}

    def _hear(self, rank: Rank) -> bool:
        messages, is_open = self._channels[rank.rank].available()
        for message in messages:
            kind = message["kind"]
            if kind == "begun":
                self._begun.add(rank.rank)
            elif kind == "show":
                self._drain(rank)
                self._output.show(rank.rank, message)
                self._tell(rank, {"kind": "shown"})
            else:  # ready, done
                self._drain(rank)
                self._answers[rank.rank] = message
                if message.get("error"):
                    self._stop_within(FAIL_S)
                self._waiting.discard(rank.rank)
        if not is_open:
            self._forget(self._channels[rank.rank].fd)
        return is_open and bool(messages)

    def _tell(self, rank: Rank, message: Message) -> None:
        try:
            self._channels[rank.rank].send(message)
        except ConnectionError:
            pass  # its pidfd reports its end

    def _drain(self, rank: Rank) -> None:
        while self._read_output(rank):
            pass

    def _read_output(self, rank: Rank) -> bool:
        chunk = self._read(rank.started.output)
        text = self._decoders[rank.rank].decode(chunk)
        if text:
            *lines, rest = (rank.pending.decode() + text).split("\n")
            rank.tail.extend(lines)
            rank.pending[:] = rest.encode()
            self._output.text(rank.rank, text)
        return bool(chunk)

    def _reap(self, rank: Rank) -> None:
        super()._reap(rank)
        if rest := rank.pending.decode():
            rank.tail.append(rest)
        self._forget(self._channels[rank.rank].fd)

    def _emit(self, rank: Rank, text: bytes) -> None:
        """Do nothing, because output was already forwarded when it was read."""

    def _descriptors(self, rank: Rank) -> Sequence[int]:  # type: ignore[override]
        return [*rank.started[1:], self._channels[rank.rank].fd]

    def close(self) -> None:
        """End all ranks at once."""
        started = len(self.ranks)
        for channel in self._channels[started:]:  # for the rank that could not be forked
            os.close(channel.fd)
        super().close()


def summary(pool: Pool) -> list[tuple[int, int, int | None]]:
    """Return (rank, process ID, resident bytes or None) for each running rank."""
    return [
        (rank.rank, rank.started.pid, _resident_bytes(rank.started.pid))
        for rank in pool.ranks
        if rank.running
    ]


def _resident_bytes(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as lines:
            return int(lines.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
