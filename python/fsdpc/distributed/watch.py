"""Sets up the watch between hosts by connecting the first rank of each host.

Rank 0 listens only while the ranks meet. The first rank of every other host connects to it. Both
sides prove knowledge of a key that was sent over the transport, and never in an argument, an
environment variable or a file. The engine's thread then takes ownership of the connections
(csrc/comm/host_watch.h).
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from fsdpc import _core
from fsdpc.distributed.environment import this_host

HELLO = b"fsdpc watch 1\n"
NONCE = 32
ANSWER = struct.Struct("!I32s32s")  # from the caller: host, nonce, proof
PROOF = 32
MEET_S = 10.0  # for all hosts
SHAKE_S = 3.0  # for one of them
WAITING = 64  # maximum number of callers that have not answered yet
TOLD = 512  # bytes that each rank sends to the others
SIOCGIFADDR = 0x8915


def start(comm: _core.Comm, hosts: int) -> None:
    """Connect the first ranks of all hosts and start the watch (collective).

    If that fails, rank 0 reports why, and training continues with deadlines but without a watch.
    """
    ranks = comm.size // hosts
    host = comm.rank // ranks
    listening: socket.socket | None = None
    mine: dict[str, Any] = {"host": this_host()[1][:63]}
    if comm.rank == 0:
        try:
            listening = _listen()
            mine["key"] = os.urandom(32).hex()
        except OSError as error:
            mine["problem"] = f"{error}"
        if listening is not None:
            mine["at"] = listening.getsockname()[:2]
        elif "problem" not in mine:
            mine["off"] = True
    told = _tell(comm, mine)
    if "off" in told[0]:
        return
    found: dict[int, socket.socket] = {}
    mine = {"problem": told[0]["problem"]} if "problem" in told[0] else {}
    try:
        if not mine and comm.rank % ranks == 0:
            key = bytes.fromhex(told[0]["key"])
            if listening is not None:
                found = accept(listening, key, hosts)
            else:
                found = {0: call(tuple(told[0]["at"]), key, host, hosts)}
    except OSError as error:
        mine = {"problem": f"{told[comm.rank]['host']}: {error}"}
    finally:
        if listening is not None:
            listening.close()
    problems = [one["problem"] for one in _tell(comm, mine) if "problem" in one]
    if not problems and found:
        comm.watch(
            [
                (connection.detach(), h * ranks, ranks, told[h * ranks]["host"])
                for h, connection in sorted(found.items())
            ],
            told[comm.rank]["host"],
        )
    for connection in found.values():
        connection.close()
    if problems and comm.rank == 0 and _core.check_environment()["FSDPC_LOG"]:
        sys.stderr.write(
            f"fsdpc: no watch between hosts: {problems[0]} (FSDPC_WATCH_ADDRESS is where rank 0 "
            "listens; FSDPC_WATCH=0 wants none)\n"
        )


def _tell(comm: _core.Comm, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather a small JSON object from every rank on all ranks."""
    text = json.dumps(mine).encode()[:TOLD]
    if len(text) == TOLD:
        text = json.dumps({"problem": "what a rank says of itself is too long"}).encode()
    row = np.frombuffer(text.ljust(TOLD), dtype=np.uint8)
    return [json.loads(bytes(one)) for one in comm.all_gather(_core.tensor(row)).numpy()]


# ---- the listening socket of rank 0 ----


def _listen() -> socket.socket | None:
    """Open a listening socket; return None if the watch is disabled."""
    environment = _core.check_environment()
    if not environment["FSDPC_WATCH"]:
        return None
    wanted = environment["FSDPC_WATCH_ADDRESS"]
    for address in [wanted] if wanted else _addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, environment["FSDPC_WATCH_PORT"]), family=family)
        except OSError as error:
            problem = OSError(f"cannot listen at {address}: {error}")
    raise problem


def _addresses() -> Iterator[str]:
    """Yield this host's addresses, most likely reachable first."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    for name in sorted(names, key=lambda name: name not in chosen):
        if (address := _of_interface(name)) and name in chosen:
            yield address
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        try:
            address = socket.gethostbyname(name) if name else ""
        except OSError:
            continue
        if address and not address.startswith("127."):
            yield address
    for name in names:
        if address := _of_interface(name):
            yield address
    yield "127.0.0.1"


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


# ---- mutual authentication ----


def _proof(key: bytes, who: bytes, host: int, hosts: int, nonces: bytes) -> bytes:
    return hmac.digest(key, who + HELLO + struct.pack("!II", host, hosts) + nonces, "sha256")


def call(at: tuple[str, int], key: bytes, host: int, hosts: int) -> socket.socket:
    """Connect to rank 0 on behalf of this host.

    Raises
    ------
    OSError
        No process answers, or the peer cannot prove that it knows the key.
    """
    connection = socket.create_connection(at, timeout=MEET_S)
    try:
        theirs = _exactly(connection, len(HELLO) + NONCE)
        if not theirs.startswith(HELLO):
            raise ConnectionError(f"something else listens at {at[0]}:{at[1]}")
        mine = os.urandom(NONCE)
        nonces = theirs[len(HELLO) :] + mine
        answer = ANSWER.pack(host, mine, _proof(key, b"caller", host, hosts, nonces))
        connection.sendall(answer)
        proof = _exactly(connection, PROOF)
        if not hmac.compare_digest(proof, _proof(key, b"called", host, hosts, nonces)):
            raise ConnectionError(f"who listens at {at[0]}:{at[1]} does not know this run's key")
    except BaseException:
        connection.close()
        raise
    return connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("rank 0 closed the connection")
    return data


class _Caller:
    """A connection from a caller that has not yet been authenticated."""

    def __init__(self, connection: socket.socket, address: Any) -> None:
        self.connection = connection
        self.address = address[0]
        self.end = time.monotonic() + SHAKE_S
        self.nonce = os.urandom(NONCE)
        self.said = b""
        connection.setblocking(False)

    def host(self, key: bytes, hosts: int) -> int | None:
        """Return the authenticated caller's host index, or None if its answer is incomplete."""
        said = self.connection.recv(ANSWER.size - len(self.said))
        self.said += said
        if not said:
            raise ConnectionError("it closed the connection")
        if len(self.said) < ANSWER.size:
            return None
        host, nonce, proof = ANSWER.unpack(self.said)
        nonces = self.nonce + nonce
        if not hmac.compare_digest(proof, _proof(key, b"caller", host, hosts, nonces)):
            raise ConnectionError("it does not know this run's key")
        self.connection.send(_proof(key, b"called", host, hosts, nonces))
        return int(host)


class _Door:
    """Accepts connections until every other host has connected."""

    def __init__(self, listening: socket.socket, key: bytes, hosts: int) -> None:
        self.listening = listening
        self.key = key
        self.hosts = hosts
        self.found: dict[int, socket.socket] = {}
        self.callers: list[_Caller] = []
        self.refused: list[tuple[str, str]] = []
        self.ready = selectors.DefaultSelector()
        self.ready.register(listening, selectors.EVENT_READ)
        listening.setblocking(False)

    def missing(self) -> list[int]:
        return [host for host in range(1, self.hosts) if host not in self.found]

    def look(self) -> None:
        """Accept waiting callers and read their answers for at most a tenth of a second."""
        for key, _ in self.ready.select(0.1):
            try:
                if key.fileobj is self.listening:
                    self._take_in(_Caller(*self.listening.accept()))
                else:
                    self._hear_out(key.data)
            except BlockingIOError:
                pass  # it has disconnected, or sent nothing yet
        for caller in [one for one in self.callers if one.end < time.monotonic()]:
            self._refuse(caller, "it said nothing")

    def _take_in(self, caller: _Caller) -> None:
        self.callers.append(caller)
        self.ready.register(caller.connection, selectors.EVENT_READ, caller)
        try:
            caller.connection.send(HELLO + caller.nonce)
        except OSError as error:
            self._refuse(caller, str(error))
        if len(self.callers) > WAITING:
            self._refuse(self.callers[0], "it said nothing, and others wait")

    def _hear_out(self, caller: _Caller) -> None:
        try:
            host = caller.host(self.key, self.hosts)
            if host is not None and host not in self.missing():
                raise ConnectionError(f"host {host} of {self.hosts} is here already")
        except BlockingIOError:
            raise
        except OSError as error:
            self._refuse(caller, str(error))
            return
        if host is not None:
            self._forget(caller)
            caller.connection.setblocking(True)
            self.found[host] = caller.connection

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._forget(caller)
        caller.connection.close()
        self.refused.append((caller.address, why))

    def _forget(self, caller: _Caller) -> None:
        self.callers.remove(caller)
        self.ready.unregister(caller.connection)

    def close(self) -> None:
        """Close the unauthenticated connections and log the refused ones."""
        self.ready.close()
        for caller in self.callers:
            caller.connection.close()
        if self.refused and _core.check_environment()["FSDPC_LOG"]:
            addresses = ", ".join(sorted({address for address, _ in self.refused}))
            address, why = self.refused[0]
            sys.stderr.write(
                f"fsdpc: the watch refused {len(self.refused)} connections, from {addresses}; "
                f"{address}: {why}\n"
            )


def accept(listening: socket.socket, key: bytes, hosts: int) -> dict[int, socket.socket]:
    """Wait for every other host to connect; refuse all other callers and log them.

    Raises
    ------
    OSError
        A host did not connect within ``MEET_S``.
    """
    door = _Door(listening, key, hosts)
    end = time.monotonic() + MEET_S
    try:
        while door.missing() and time.monotonic() < end:
            door.look()
    finally:
        door.close()
    if missing := door.missing():
        for connection in door.found.values():
            connection.close()
        at = "{}:{}".format(*listening.getsockname()[:2])
        raise TimeoutError(f"hosts {missing} did not reach {at} within {MEET_S:g} s")
    return door.found
