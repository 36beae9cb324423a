"""Two hosts on this machine: network namespaces, joined by a pair of veth devices.

Each has a network, a /sys that shows it, and a host name of its own, and shares everything else:
processes, memory, files. UCX, below MPICH, is told to take the wire. Making them needs root and
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

ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Put before a command that is to see the devices of its host in /sys, as UCX does.
OWN_SYS = ["unshare", "-m", "sh", "-c", 'mount -t sysfs sys /sys && exec "$@"', "sh"]
# UCX, below MPICH, would take shared memory. Ranks on both hosts may get the settings of one.
UCX = ["UCX_TLS=tcp,self", "UCX_NET_DEVICES=v0,v1"]
# What mpirun starts instead of ssh: [options] ADDRESS COMMAND...
AGENT = """#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do shift; done
address=$1; shift
case $address in
    {addresses[0]}) exec {inside[0]} sh -c "$*";;
    {addresses[1]}) exec {inside[1]} sh -c "$*";;
esac
"""


class Hosts:
    """Two hosts that exist: ``inside[i]`` is put before a command that runs on host i.

    ``agent`` is a program for mpirun that starts commands on a host, as ssh does.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"fsdpc{os.getpid()}h"
        self.inside = [[*self.entered(i), *OWN_SYS, "env", f"GLOO_SOCKET_IFNAME=v{i}", *UCX]
                       for i in range(2)]  # fmt: skip
        self.agent = folder / "agent"
        inside = [shlex.join(words) for words in self.inside]
        self.agent.write_text(AGENT.format(addresses=ADDRESSES, inside=inside), encoding="utf-8")
        self.agent.chmod(0o755)

    def entered(self, i: int) -> list[str]:
        """What is put before a command that runs on host i, and sees the /sys of all."""
        return ["nsenter", f"--net=/run/netns/{self.name}{i}", f"--uts={self.folder}/uts{i}"]

    def ip(self, words: str) -> bytes:
        """Run iproute2 with these words and return what it prints."""
        done = subprocess.run(["ip", *words.split()], check=True, timeout=60, capture_output=True)
        return done.stdout

    def make(self, rate: str) -> None:
        for i in range(2):
            self.ip(f"netns add {self.name}{i}")
            (self.folder / f"uts{i}").touch()
            name = ["unshare", f"--uts={self.folder}/uts{i}", "hostname", f"node{i}"]
            subprocess.run(name, check=True, timeout=60)
        self.ip(f"link add v0 netns {self.name}0 type veth peer name v1 netns {self.name}1")
        for i, address in enumerate(ADDRESSES):
            self.ip(f"-n {self.name}{i} addr add {address}/24 dev v{i}")
            self.ip(f"-n {self.name}{i} link set v{i} up")
            self.ip(f"-n {self.name}{i} link set lo up")
        if rate != "none":
            self.shape(rate)
        self.wait_for_carrier()

    def wait_for_carrier(self) -> None:
        """Wait until the kernel says that the devices run, a second or so: UCX wants them so."""
        end = time.monotonic() + 30
        while any(
            json.loads(self.ip(f"-n {self.name}{i} -j link show v{i}"))[0]["operstate"] != "UP"
            for i in range(2)
        ):
            if time.monotonic() > end:
                raise TimeoutError(f"v0 and v1 of {self.name} are not up after 30 s")
            time.sleep(0.02)

    def shape(self, rate: str) -> None:
        """Let the wire have another rate, as :func:`two_hosts` takes it, from now on."""
        tbf = "qdisc del dev v{} root" if rate == "none" else (
            f"qdisc replace dev v{{}} root tbf rate {rate} burst 128kb latency 50ms"
        )
        for i in range(2):
            self.ip(f"netns exec {self.name}{i} tc {tbf.format(i)}")

    def sent_bytes(self) -> int:
        """What the first host has put on the wire."""
        device = json.loads(self.ip(f"-n {self.name}0 -s -j link show v0"))[0]
        return int(device["stats64"]["tx"]["bytes"])

    def cable(self, state: str) -> None:
        """Pull the cable ("down") or put it back ("up")."""
        self.ip(f"-n {self.name}0 link set v0 {state}")

    def processes(self) -> list[str]:
        """The command lines of what runs on either host."""
        pids = b" ".join(self.ip(f"netns pids {self.name}{i}") for i in range(2)).split()
        lines = []
        for pid in pids:
            with suppress(OSError):  # it has just ended
                line = Path(f"/proc/{pid.decode()}/cmdline").read_bytes().decode("utf-8", "replace")
                lines.append(line.replace("\0", " "))
        return lines

    def remove(self) -> None:
        for i in range(2):
            for words in (["umount", str(self.folder / f"uts{i}")],
                          ["ip", "netns", "del", f"{self.name}{i}"]):  # fmt: skip
                subprocess.run(words, stderr=subprocess.DEVNULL, timeout=60)


def missing() -> str | None:
    """What hosts need and this machine has not; None: nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tools = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    return f"needs {' and '.join(tools)} of iproute2 and util-linux" if tools else None


@contextmanager
def two_hosts(rate: str = "none") -> Iterator[Hosts]:
    """Two hosts with a wire of that rate ("1gbit"; "none": as fast as it goes)."""
    with tempfile.TemporaryDirectory(prefix="fsdpc-hosts-") as folder:
        hosts = Hosts(Path(folder))
        try:
            hosts.make(rate)
            yield hosts
        finally:
            hosts.remove()
