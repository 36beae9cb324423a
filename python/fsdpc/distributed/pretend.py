"""Simulated hosts for tests: groups of ranks on this machine that share no memory.

Only :mod:`fsdpc.testing` uses this. Each rank reports a made-up host identifier, and Python threads
carry data between hosts over Unix sockets that connect all ranks. The speed therefore differs from
that of a real network. The engine treats this transport like any other.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time

from fsdpc import _core
from fsdpc.distributed import carriers, environment

HEAD = struct.Struct("<IQ")  # tag, bytes
WHO = struct.Struct("<I")  # the calling rank
FAREWELL = HEAD.pack(0, 2**64 - 1)  # the end of the data; without it, the process died
MEET_S = 30.0


def on_hosts(hosts: int) -> None:
    """Assign this rank to one of ``hosts`` simulated hosts; call it before the ranks meet."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if hosts < 1 or size % hosts:
        raise ValueError(f"{size} ranks on {hosts} hosts: every host must have as many")
    here = size // hosts
    os.environ.update(LOCAL_RANK=str(rank % here), LOCAL_WORLD_SIZE=str(here))
    environment.pretended_host = rank // here


def carry(rank: int, size: int, address: str) -> _core.Transport:
    """Create a transport between the ranks that share this ``address`` (collective)."""
    peers = _meet(rank, size, f"\0fsdpc-pretend-{os.geteuid()}-{address}-")
    transport = _core.Transport(rank, size)

    def close() -> None:
        for connection in peers.values():
            connection.close()

    works = [lambda: _send(transport, peers), lambda: _receive(transport, peers)]
    carriers.start(transport, rank, works, close)
    return transport


def _meet(rank: int, size: int, name: str) -> dict[int, socket.socket]:
    """Connect all ranks: each connects to lower ranks and accepts connections from higher ones."""
    peers = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{name}{rank}")
        listening.listen(size)
        listening.settimeout(MEET_S)
        for peer in range(rank):
            peers[peer] = _call(f"{name}{peer}")
            peers[peer].sendall(WHO.pack(rank))
        while len(peers) < size - 1:
            connection, _ = listening.accept()
            who = bytearray(WHO.size)
            _fill(connection, memoryview(who))
            peers[WHO.unpack(who)[0]] = connection
    return peers


def _call(name: str) -> socket.socket:
    end = time.monotonic() + MEET_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(name)
            return connection
        except ConnectionRefusedError:  # that rank does not listen yet
            connection.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("a rank's end closed")
        view = view[count:]


def _send(transport: _core.Transport, peers: dict[int, socket.socket]) -> None:
    try:
        while True:
            message = transport.take(0, carriers.LOOK_S)
            if message is not None:
                peer, tag, data = message
                peers[peer].sendall(HEAD.pack(tag, len(data)))
                if len(data) > 0:  # otherwise that rank may have received everything and left
                    peers[peer].sendall(data)
    except _core.PeerError:  # everything posted has been sent
        for connection in peers.values():
            try:
                connection.sendall(FAREWELL)
            except OSError:
                pass  # that rank is gone
        raise


def _receive(transport: _core.Transport, peers: dict[int, socket.socket]) -> None:
    with selectors.DefaultSelector() as ready:
        for peer, connection in peers.items():
            ready.register(connection, selectors.EVENT_READ, peer)
        while ready.get_map():
            for key, _ in ready.select():
                connection, peer = peers[key.data], key.data
                head = bytearray(HEAD.size)
                _fill(connection, memoryview(head))
                if head == FAREWELL:
                    ready.unregister(connection)
                    continue
                tag, size = HEAD.unpack(head)
                _fill(connection, transport.buffer(0, size))
                if not transport.deliver(0, peer, tag):
                    return
