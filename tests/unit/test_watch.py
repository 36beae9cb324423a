"""How the watch between hosts connects: who knows the key is taken, and nobody else.

Whole runs are on pretended hosts (fsdpc.testing), whose watch is as that of others.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.common import build, step
from tests.load import Load

import fsdpc
from fsdpc.distributed import watch

KEY = bytes(range(32))
Found = dict[int, socket.socket]


class Door:
    """Rank 0, which waits for the other hosts on a thread."""

    def __init__(self, hosts: int) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.at = self.listening.getsockname()
        self.found: Found = {}
        self.problem: OSError | None = None
        self.hosts = hosts
        self.thread = threading.Thread(target=self.wait)
        self.thread.start()

    def wait(self) -> None:
        try:
            self.found = watch.accept(self.listening, KEY, self.hosts)
        except OSError as error:
            self.problem = error

    def close(self) -> None:
        self.thread.join(60)
        self.listening.close()
        for connection in self.found.values():
            connection.close()


@contextlib.contextmanager
def waiting(hosts: int = 2) -> Iterator[Door]:
    """Rank 0, to which the hosts come that the test has not sent."""
    door = Door(hosts)
    try:
        yield door
        with contextlib.suppress(OSError):
            watch.call(door.at, KEY, 1, hosts).close()
    finally:
        door.close()


def test_hosts_find_each_other() -> None:
    door = Door(3)
    ends = {host: watch.call(door.at, KEY, host, 3) for host in (2, 1)}
    door.close()
    assert sorted(door.found) == [1, 2] and door.problem is None
    for end in ends.values():
        end.close()


def test_another_key_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with waiting() as door, pytest.raises(OSError):
        watch.call(door.at, bytes(32), 1, 2)
    assert sorted(door.found) == [1]
    assert "refused 1 connections, from 127.0.0.1" in (said := capfd.readouterr().err)
    assert "does not know this run's key" in said


def test_whoever_listens_has_to_know_it_too() -> None:
    """A caller does not believe whoever is at that port."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            connection = impostor.accept()[0]
            connection.sendall(watch.HELLO + bytes(watch.NONCE))
            connection.recv(watch.ANSWER.size, socket.MSG_WAITALL)
            connection.sendall(bytes(watch.PROOF))
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="does not know this run's key"):
            watch.call(impostor.getsockname(), KEY, 1, 2)
        thread.join(60)


def test_an_answer_is_good_once(capfd: pytest.CaptureFixture[str]) -> None:
    """What was overheard is the answer to another nonce."""
    with waiting(3) as door:
        heard = b""

        def overhear(connection: socket.socket) -> bytes:
            return connection.recv(len(watch.HELLO) + watch.NONCE, socket.MSG_WAITALL)

        with socket.create_connection(door.at) as first:
            nonce = overhear(first)[len(watch.HELLO) :]
            proof = watch._proof(KEY, b"caller", 2, 3, nonce + bytes(watch.NONCE))
            heard = watch.ANSWER.pack(2, bytes(watch.NONCE), proof)
            first.sendall(heard)
            assert len(first.recv(watch.PROOF, socket.MSG_WAITALL)) == watch.PROOF
            with socket.create_connection(door.at) as again:
                overhear(again)
                again.sendall(heard)
                assert again.recv(1) == b""
    assert sorted(door.found) == [1, 2]
    assert "does not know this run's key" in capfd.readouterr().err


def test_noise_silence_and_crowds(capfd: pytest.CaptureFixture[str]) -> None:
    """Hosts still find each other, and the log counts who was refused."""
    with waiting() as door:
        silent = [socket.create_connection(door.at) for _ in range(5)]
        for _ in range(1000):
            with socket.create_connection(door.at) as noisy, contextlib.suppress(OSError):
                noisy.sendall(os.urandom(watch.ANSWER.size))
    for connection in silent:
        connection.close()
    assert sorted(door.found) == [1]
    said = capfd.readouterr().err
    count = int(said.split("refused ")[1].split()[0])
    assert 900 <= count <= 1005, said


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MEET_S", 0.2)
    door = Door(3)
    door.close()
    assert "hosts [1, 2] did not reach 127.0.0.1" in str(door.problem)
    assert door.found == {}


def test_an_address_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPC_WATCH_ADDRESS", "203.0.113.1")
    with pytest.raises(OSError, match="cannot listen at 203.0.113.1"):
        watch._listen()


def test_it_binds_to_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPC_WATCH_ADDRESS", "127.0.0.1")
    listening = watch._listen()
    assert listening is not None
    with listening:
        port = f"{listening.getsockname()[1]:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"]
        assert ours == [f"0100007F:{port}"]
    monkeypatch.setenv("FSDPC_WATCH", "0")
    assert watch._listen() is None


# ---- Whole runs ----

FEW_S = 60


def tcp_sockets() -> dict[str, int]:
    """How many TCP sockets this process has, by their state (of /proc/net/tcp)."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(fd))
    found: dict[str, int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in mine:
            found[fields[3]] = found.get(fields[3], 0) + 1
    return found


ESTABLISHED = "01"


@pytest.mark.ranks(4, hosts=2, init=False)
def test_the_key_is_in_nothing_that_others_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once the ranks have met nobody listens: the first ranks of hosts have a connection."""
    monkeypatch.setattr(watch.os, "urandom", lambda size: (KEY * size)[:size])
    fsdpc.init()
    assert tcp_sockets() == ({ESTABLISHED: 1} if fsdpc.local_rank() == 0 else {})
    fsdpc.barrier()
    seen = [Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/environ").read_bytes()]
    seen += [f"{name}={value}".encode() for name, value in os.environ.items()]
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            # Memory that ranks of the run share has no name by which others could open it.
            if stat.S_ISREG(fd.stat().st_mode) and not os.readlink(fd).startswith("/memfd:"):
                seen.append(fd.read_bytes())
    assert not [text for text in seen if KEY in text or KEY.hex().encode() in text]


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


ATTACKERS = 4
A_SECOND = 1000  # connections, on a machine without load


class Attack:
    """Noise, silence and wrong keys from several threads of a rank, until a file is there.

    ``taken`` and ``refused`` have the times of calls; nobody listens before the ranks meet, and
    none once they have.
    """

    def __init__(self, port: int, until: Path, enough: Path) -> None:
        self.at = ("127.0.0.1", port)
        self.until, self.enough = until, enough
        self.taken: list[float] = []
        self.refused: list[float] = []
        self.threads = [threading.Thread(target=self.work) for _ in range(ATTACKERS)]
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        silent = []
        count = 0
        while not self.until.exists():
            count += 1
            try:
                if count % 100 == 50:
                    silent.append(socket.create_connection(self.at, timeout=5))
                elif count % 100 == 75:
                    watch.call(self.at, bytes(32), 1, 2).close()
                else:
                    with socket.create_connection(self.at, timeout=5) as noisy:
                        noisy.sendall(os.urandom(watch.ANSWER.size))
            except ConnectionRefusedError:
                self.refused.append(time.monotonic())
                continue
            except OSError:
                pass  # it was sent away
            self.taken.append(time.monotonic())
            if len(self.taken) >= 2 * A_SECOND:
                self.enough.touch()
        for connection in silent:
            connection.close()

    def close(self) -> None:
        for thread in self.threads:
            thread.join(FEW_S)


def a_second(calls: list[float], count: int) -> float:
    """How fast the first so many were; later ones may wait for a rank that no longer answers."""
    return count / (calls[count - 1] - calls[0])


@pytest.mark.ranks(4, hosts=2, init=False)
def test_training_goes_on_under_attack(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 attacks while they meet, and while they train; the late host is taken all the same.

    Two thousand calls are taken and a thousand turned away, at a thousand a second, times the
    share of a processor that a busy machine gives.
    """
    rank = int(os.environ["RANK"])
    os.environ.update(FSDPC_WATCH_ADDRESS="127.0.0.1", FSDPC_WATCH_PORT=str(port))
    attacked, over = tmp_path / "attacked", tmp_path / "over"
    late = watch.call
    log = io.StringIO()

    def call_late(*args: Any) -> socket.socket:
        end = time.monotonic() + FEW_S
        while not attacked.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        return late(*args)

    monkeypatch.setattr(watch, "MEET_S", FEW_S)
    if rank == 0:
        monkeypatch.setattr(sys, "stderr", log)
    elif rank == 2:
        monkeypatch.setattr(watch, "call", call_late)
    with Load() as load:
        attack = Attack(port, over, attacked) if rank == 1 else None
        began = time.monotonic()
        fsdpc.init()
        assert tcp_sockets().get(ESTABLISHED, 0) >= (rank in (0, 2))
        model = build()
        optimizer = fsdpc.optim.AdamW(model.parameters())
        before = len(attack.refused) if attack else 0
        losses = [step(model, optimizer)]
        until = time.monotonic() + 1.0

        def goes_on() -> bool:
            few = attack is not None and len(attack.refused) - before < A_SECOND
            return few or time.monotonic() < until

        while fsdpc.all_reduce(float(goes_on())):
            losses.append(step(model, optimizer))
        over.touch()
    assert losses[-1] < losses[0]
    if rank == 0:
        said = log.getvalue()
        assert "the watch refused" in said and "127.0.0.1" in said, said
        assert int(said.split("refused ")[1].split()[0]) > 500, said
    if attack:
        attack.close()
        least = A_SECOND / load.slowness(began, time.monotonic())
        assert a_second(attack.taken, 2 * A_SECOND) > least
        assert a_second(attack.refused[before:], A_SECOND) > least


@pytest.mark.ranks(4, hosts=2)
@pytest.mark.usefixtures("no_watch")
def test_without_a_watch() -> None:
    """No port, no connection; who leaves is still found out, by those who wait for it."""
    assert tcp_sockets() == {}
    assert fsdpc.all_reduce(1) == 4
    fsdpc.barrier()
    if fsdpc.rank() == 3:
        return
    with pytest.raises(fsdpc.PeerError, match="rank 3"):
        for _ in range(3):
            fsdpc.barrier()


@pytest.fixture
def no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPC_WATCH", "0")
