"""Send bytes between hosts over torch's process groups.

The engine's transport (``_core.Transport``) queues messages, which three threads carry. One sends
this rank's messages. Another thread receives frames from any rank and posts receives for the
messages they announce. The third waits for those receives and delivers the messages. (They call the
groups' methods, which ``torch.distributed.send`` and ``recv`` wrap; this takes a fifth less time.)
Each message has a fixed-size frame, which can contain a whole small message, so an epoch note is a
single send.

Gloo sends a message only after the peer has announced over the same connection that it is ready to
receive. If that announcement queued behind the peer's own data, the connection would carry data in
only one direction at a time. Frames, messages to higher ranks and messages to lower ranks therefore
use separate groups.
"""

from __future__ import annotations

import queue
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdpc import _core
from fsdpc.distributed import carriers

FRAME = 512
HEAD = struct.Struct("<IQ")  # tag, bytes
INLINE = FRAME - HEAD.size
FOR_EVER = timedelta(days=3650)  # traffic may pause between steps; the engine enforces deadlines


def carry(group: Any, hosts: int) -> _core.Transport:
    """Create a transport between the ranks of a process group, over new groups; collective.

    A rank exchanges messages with one rank of each other host.
    """
    ranks = dist.get_process_group_ranks(group)
    transport = _core.Transport(dist.get_rank(group), len(ranks), peers=hosts - 1)
    # Use gloo whatever the given group's backend is, because messages are in host memory.
    options: dict[str, Any] = {"timeout": FOR_EVER, "backend": "gloo"}
    carrier = _Carrier(transport, *(
        dist.new_group(ranks, use_local_synchronization=True, **options) for _ in range(3)
    ))  # fmt: skip
    carriers.start(transport, dist.get_rank(), [carrier.send, carrier.frames, carrier.bodies])
    return transport


def _wait(works: list[Any]) -> None:
    while works:  # wait on each once: gloo would wait for another send
        works.pop().wait()


class _Carrier:
    """The functions that a transport's threads run."""

    def __init__(self, transport: _core.Transport, frames: Any, up: Any, down: Any) -> None:
        self._transport = transport
        self._frames, self._up, self._down = frames, up, down
        self._posted: queue.SimpleQueue[tuple[int, int, int, Any] | None] = queue.SimpleQueue()
        self._free: queue.LifoQueue[int] = queue.LifoQueue()  # the last used is large already
        self._goes_on: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for buffer in range(transport.buffers):
            self._free.put(buffer)

    def _group_to(self, higher: bool) -> Any:
        return self._up if higher else self._down

    def send(self) -> None:
        """Send the messages that the engine posts; when out of buffers, wait for the oldest."""
        under_way: list[list[Any]] = [[] for _ in range(self._transport.buffers)]
        buffer = 0
        try:
            while True:
                _wait(under_way[buffer])
                message = self._transport.take(buffer, carriers.LOOK_S)
                if message is None:
                    continue
                peer, tag, data = message
                frame = bytearray(FRAME)
                HEAD.pack_into(frame, 0, tag, len(data))
                inline = len(data) <= INLINE
                if inline:
                    frame[HEAD.size : HEAD.size + len(data)] = data
                works = [self._frames.send([torch.frombuffer(frame, dtype=torch.uint8)], peer, 0)]
                if not inline:
                    group = self._group_to(peer > self._transport.rank)
                    works.append(group.send([torch.frombuffer(data, dtype=torch.uint8)], peer, 0))
                under_way[buffer] = works
                buffer = (buffer + 1) % self._transport.buffers
        except _core.PeerError:  # all posted messages have been sent
            for works in under_way:
                _wait(works)
            raise

    def frames(self) -> None:
        """Receive frames and post receives for the messages they announce, until the last frame."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        head = memoryview(frame.numpy())
        try:
            goes_on = True
            while goes_on:
                work = self._frames.recv_anysource([frame], 0)
                work.wait()
                peer = work._source_rank()
                tag, size = HEAD.unpack_from(head)
                buffer, body = self._free.get(), None
                view = self._transport.buffer(buffer, size)
                if size <= INLINE:
                    view[:] = head[HEAD.size : HEAD.size + size]
                else:
                    group = self._group_to(peer < self._transport.rank)
                    body = group.recv([torch.frombuffer(view, dtype=torch.uint8)], peer, 0)
                self._posted.put((buffer, peer, tag, body))
                if tag >= self._transport.tags:
                    goes_on = self._goes_on.get()
        finally:
            self._posted.put(None)

    def bodies(self) -> None:
        """Deliver messages in the order of their frames."""
        try:
            while (message := self._posted.get()) is not None:
                buffer, peer, tag, body = message
                if body is not None:
                    body.wait()
                goes_on = self._transport.deliver(buffer, peer, tag)
                self._free.put(buffer)
                if tag >= self._transport.tags:
                    self._goes_on.put(goes_on)
        finally:  # after an error, the other thread must not wait for this one
            self._goes_on.put(False)
            self._free.put(0)
