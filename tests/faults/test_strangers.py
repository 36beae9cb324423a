"""Processes that are no rank of the run knock where its ranks meet: they are sent away."""

from __future__ import annotations

import io
import os
import socket
import struct
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import fsdpc
from fsdpc.distributed.environment import run_address

from .common import run, wait_file

NOBODY = 65534


def hello(secret: str) -> bytes:
    """As rank 1 of 2 says it."""
    return struct.pack("=8s32s3i", b"fsdpc 2\0", secret.encode(), 1, 2, 4711)


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


@pytest.mark.parametrize(
    "who", ["another user", "poses as rank 1", "says nothing known", "says too little"]
)
@pytest.mark.ranks(1, init=False)
def test_strangers_are_sent_away_and_the_ranks_meet(who: str, tmp_path: Path) -> None:
    if who == "another user" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    poses, unknown = hello("what it guessed"), b"x" * len(hello(""))
    message = {"poses as rank 1": poses, "says nothing known": unknown}.get(who, b"hm")
    user = NOBODY if who == "another user" else None

    def rank_of(rank: int) -> int:
        if rank == 1:
            wait_file(tmp_path / "0 comes")
            told = hello(run_address(os.environ)[1]) if user else message
            assert knock(name_of_rank_0(), told, user) == b""
        else:
            (tmp_path / "0 comes").write_text("yes")
        fsdpc.init()
        return fsdpc.all_reduce(1)

    with redirect_stdout(io.StringIO()) as printed:
        assert run(rank_of, 2) == [2, 2]
    told = "which is not of this run, knocked at rank 0" in printed.getvalue()
    assert told == (user is None)
