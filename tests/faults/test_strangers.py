"""Processes that are no rank of the run knock where its ranks meet: they are sent away."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

import fsdpc

from .common import run, wait_file

HELLO = struct.pack("=8s3i", b"fsdpc 1\0", 1, 2, 4711)  # as rank 1 of 2 says it
NOBODY = 65534


def name_of_rank_0() -> bytes:
    """The socket that rank 0 listens at, from that of rank 1, who asks."""
    with socket.socket(fileno=os.dup(int(os.environ["FSDPC_RANK_SOCKET"]))) as own:
        name = own.getsockname()
    assert name.endswith(b"-1")
    return name[:-1] + b"0"


def knock(name: bytes, message: bytes, user: int | None) -> bytes:
    """What a stranger gets: b"" is a closed door."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        if user is not None:
            os.setuid(user)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(10)
            door.connect(name)
            try:
                door.send(message)
                theirs.send(b"got " + door.recv(100))
            except (BrokenPipeError, ConnectionResetError):  # closed before it was sent, or read
                theirs.send(b"got ")
        os._exit(0)
    os.waitpid(pid, 0)
    with ours, theirs:
        ours.settimeout(1)
        return ours.recv(200).removeprefix(b"got ")


@pytest.mark.parametrize("who", ["another user", "says nothing known", "says too little"])
@pytest.mark.ranks(1, init=False)
def test_strangers_are_sent_away_and_the_ranks_meet(who: str, tmp_path: Path) -> None:
    if who == "another user" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    message = {"another user": HELLO, "says nothing known": b"x" * len(HELLO)}.get(who, b"hm")
    user = NOBODY if who == "another user" else None

    def rank_of(rank: int) -> int:
        if rank == 1:
            wait_file(tmp_path / "0 comes")
            assert knock(name_of_rank_0(), message, user) == b""
        else:
            (tmp_path / "0 comes").write_text("yes")
        fsdpc.init()
        return fsdpc.all_reduce(1)

    assert run(rank_of, 2) == [2, 2]
