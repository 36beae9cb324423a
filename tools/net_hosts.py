"""Hosts on this machine: network namespaces, joined by veth devices.

Each has a network, a /sys that shows it, and a host name of its own, and shares everything else:
processes, memory, files. One wire joins two hosts; more have a wire each to a switch, which is a
bridge in another namespace. UCX, below MPICH, is told to take the wire. Making hosts needs root and
iproute2; :func:`missing` says what is not there.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST = 8
ADDRESSES = tuple(f"10.77.0.{i + 1}" for i in range(MOST))
# Put before a command that is to see the devices of its host in /sys, as UCX does.
OWN_SYS = ["unshare", "-m", "sh", "-c", 'mount -t sysfs sys /sys && exec "$@"', "sh"]
# UCX, below MPICH, would take shared memory. Ranks on both hosts may get the settings of one.
UCX = ["UCX_TLS=tcp,self", "UCX_NET_DEVICES=" + ",".join(f"v{i}" for i in range(MOST))]
# What mpirun starts instead of ssh: [options] ADDRESS COMMAND...
AGENT = """#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do shift; done
address=$1; shift
case $address in
{cases}
esac
"""


class Hosts:
    """Hosts that exist: ``inside[i]`` is put before a command that runs on host i.

    ``agent`` is a program for mpirun that starts commands on a host, as ssh does.
    """

    def __init__(self, folder: Path, n: int) -> None:
        self.folder = folder
        self.n = n
        self.name = f"fsdpc{os.getpid()}h"
        self.inside = [[*self.entered(i), *OWN_SYS, "env", f"GLOO_SOCKET_IFNAME=v{i}", *UCX]
                       for i in range(n)]  # fmt: skip
        self.agent = folder / "agent"
        cases = [f'    {address}) exec {shlex.join(words)} sh -c "$*";;'
                 for address, words in zip(ADDRESSES, self.inside, strict=False)]  # fmt: skip
        self.agent.write_text(AGENT.replace("{cases}", "\n".join(cases)), encoding="utf-8")
        self.agent.chmod(0o755)

    def entered(self, i: int) -> list[str]:
        """What is put before a command that runs on host i, and sees the /sys of all."""
        return ["nsenter", f"--net=/run/netns/{self.name}{i}", f"--uts={self.folder}/uts{i}"]

    def ip(self, words: str) -> bytes:
        """Run iproute2 with these words and return what it prints."""
        done = subprocess.run(["ip", *words.split()], check=True, timeout=60, capture_output=True)
        return done.stdout

    def make(self, rate: str) -> None:
        for i in range(self.n):
            self.ip(f"netns add {self.name}{i}")
            (self.folder / f"uts{i}").touch()
            name = ["unshare", f"--uts={self.folder}/uts{i}", "hostname", f"node{i}"]
            subprocess.run(name, check=True, timeout=60)
        self.join()
        for i, address in enumerate(ADDRESSES[: self.n]):
            self.ip(f"-n {self.name}{i} addr add {address}/24 dev v{i}")
            self.ip(f"-n {self.name}{i} link set v{i} up")
            self.ip(f"-n {self.name}{i} link set lo up")
        if rate != "none":
            self.shape(rate)
        self.wait_for_carrier()

    def join(self) -> None:
        if self.n == 2:
            self.ip(f"link add v0 netns {self.name}0 type veth peer name v1 netns {self.name}1")
            return
        switch = f"{self.name}s"
        self.ip(f"netns add {switch}")
        self.ip(f"-n {switch} link add bridge type bridge")
        self.ip(f"-n {switch} link set bridge up")
        for i in range(self.n):
            self.ip(f"link add v{i} netns {self.name}{i} type veth peer name p{i} netns {switch}")
            self.ip(f"-n {switch} link set p{i} master bridge up")

    def wait_for_carrier(self) -> None:
        """Wait until the kernel says that the devices run, a second or so: UCX wants them so."""
        end = time.monotonic() + 30
        while any(
            json.loads(self.ip(f"-n {self.name}{i} -j link show v{i}"))[0]["operstate"] != "UP"
            for i in range(self.n)
        ):
            if time.monotonic() > end:
                raise TimeoutError(f"the devices of {self.name} are not up after 30 s")
            time.sleep(0.02)

    def shape(self, rate: str) -> None:
        """Let both directions of each wire have another rate, as :func:`net_hosts` takes it."""
        tbf = "qdisc del dev {} root" if rate == "none" else (
            f"qdisc replace dev {{}} root tbf rate {rate} burst 128kb latency 50ms"
        )
        for i in range(self.n):
            self.ip(f"netns exec {self.name}{i} tc {tbf.format(f'v{i}')}")
            if self.n > 2:
                self.ip(f"netns exec {self.name}s tc {tbf.format(f'p{i}')}")

    def sent_bytes(self) -> int:
        """What the first host has put on the wire."""
        device = json.loads(self.ip(f"-n {self.name}0 -s -j link show v0"))[0]
        return int(device["stats64"]["tx"]["bytes"])

    def cable(self, state: str) -> None:
        """Pull the cable ("down") or put it back ("up")."""
        self.ip(f"-n {self.name}0 link set v0 {state}")

    def processes(self) -> list[str]:
        """The command lines of what runs on the hosts."""
        pids = b" ".join(self.ip(f"netns pids {self.name}{i}") for i in range(self.n)).split()
        lines = []
        for pid in pids:
            with suppress(OSError):  # it has just ended
                line = Path(f"/proc/{pid.decode()}/cmdline").read_bytes().decode("utf-8", "replace")
                lines.append(line.replace("\0", " "))
        return lines

    def remove(self) -> None:
        for i in range(self.n):
            for words in (["umount", str(self.folder / f"uts{i}")],
                          ["ip", "netns", "del", f"{self.name}{i}"]):  # fmt: skip
                subprocess.run(words, stderr=subprocess.DEVNULL, timeout=60)
        if self.n > 2:
            subprocess.run(["ip", "netns", "del", f"{self.name}s"], stderr=subprocess.DEVNULL,
                           timeout=60)  # fmt: skip


def missing() -> str | None:
    """What hosts need and this machine has not; None: nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tools = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    return f"needs {' and '.join(tools)} of iproute2 and util-linux" if tools else None


@contextmanager
def net_hosts(n: int = 2, rate: str = "none") -> Iterator[Hosts]:
    """`n` hosts with wires of that rate ("1gbit"; "none": as fast as it goes)."""
    if not 2 <= n <= MOST:
        raise ValueError(f"net_hosts: n is {n}, but must be 2 to {MOST}")
    with tempfile.TemporaryDirectory(prefix="fsdpc-hosts-") as folder:
        hosts = Hosts(Path(folder), n)
        try:
            hosts.make(rate)
            yield hosts
        finally:
            hosts.remove()
