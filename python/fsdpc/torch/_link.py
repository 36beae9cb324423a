"""Bytes between hosts over a process group of torch's.

The engine's link (``_core.Link``) keeps messages; two threads carry them. One takes what this rank
sends and hands it to the group, the other receives from anybody and delivers. (They call the
group's methods, which ``torch.distributed.send`` and ``recv`` wrap, for a fifth less time.) Each
message begins with a frame of fixed size, which holds small ones whole, so that a note of an epoch
is one send.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdpc import _core
from fsdpc._launch import carriers

FRAME = 512
HEAD = struct.Struct("<IQ")  # tag, bytes
INLINE = FRAME - HEAD.size
FOR_EVER = timedelta(days=3650)  # between steps nobody sends anything; the engine has deadlines


def carry(group: Any) -> _core.Link:
    """Make a link between the ranks of a process group, carried by one of its own; collective."""
    group = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=FOR_EVER,
        backend="gloo",  # memory of the host, whatever the group's own tensors are on
        use_local_synchronization=True,
    )
    link = _core.Link(dist.get_rank(group), dist.get_world_size(group))
    works = [lambda: _send(link, group), lambda: _receive(link, group)]
    carriers.start(link, dist.get_rank(), works)
    return link


def _send(link: _core.Link, group: Any) -> None:
    while True:
        message = link.take(carriers.LOOK_S)
        if message is None:
            continue
        peer, tag, data = message
        frame = bytearray(FRAME)
        HEAD.pack_into(frame, 0, tag, len(data))
        inline = len(data) <= INLINE
        if inline:
            frame[HEAD.size : HEAD.size + len(data)] = data
        for part in [frame] if inline else [frame, data]:
            group.send([torch.frombuffer(part, dtype=torch.uint8)], peer, 0).wait()


def _receive(link: _core.Link, group: Any) -> None:
    frame = torch.empty(FRAME, dtype=torch.uint8)
    head = memoryview(frame.numpy())
    goes_on = True
    while goes_on:
        work = group.recv_anysource([frame], 0)
        work.wait()
        peer = work._source_rank()
        tag, size = HEAD.unpack_from(head)
        room = link.room(size)
        if size <= INLINE:
            room[:] = head[HEAD.size : HEAD.size + size]
        else:
            group.recv([torch.frombuffer(room, dtype=torch.uint8)], peer, 0).wait()
        goes_on = link.deliver(peer, tag)
