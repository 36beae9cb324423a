"""Hosts (namespaces of this machine) under torch: bits, and what is learned of failures."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401, optimizers import it: here once, not on every forked rank

from fsdpc.launching.forked import Report, run_forked
from tests.needs import need_hosts

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("two_hosts_steps.py")
PATIENCE_S = 120
TIMEOUT_S = "100"  # of the engine's waits: no test waits for it

sys.path.insert(0, str(ROOT / "tools"))
import net_hosts  # noqa: E402

need_hosts()


class World:
    """Ranks that train until :meth:`finish`."""

    def __init__(
        self,
        hosts: net_hosts.Hosts,
        ranks_of_host: int,
        folder: Path,
        watch_s: int = 4,
        program: Path = PROGRAM,
    ) -> None:
        self.end = folder / "end"
        self.outputs = [folder / f"rank{r}" for r in range(2 * ranks_of_host)]
        self.ranks = []
        for r, output in enumerate(self.outputs):
            environment = {
                **os.environ,
                "RANK": str(r),
                "WORLD_SIZE": str(2 * ranks_of_host),
                "LOCAL_RANK": str(r % ranks_of_host),
                "LOCAL_WORLD_SIZE": str(ranks_of_host),
                "MASTER_ADDR": net_hosts.ADDRESSES[0],
                "MASTER_PORT": "29521",
                "OMP_NUM_THREADS": "1",
                "FSDPC_TIMEOUT_S": TIMEOUT_S,
                "FSDPC_WATCH": str(watch_s),
            }
            command = [*hosts.inside[r // ranks_of_host], sys.executable, str(program)]
            with output.open("wb") as file:
                self.ranks.append(
                    subprocess.Popen(
                        [*command, str(self.end)], env=environment, stdout=file, stderr=file
                    )
                )

    def text(self, rank: int) -> str:
        return self.outputs[rank].read_text()

    def wait_for(self, rank: int, words: str) -> None:
        """Until a rank has said so."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.text(rank):
            assert time.monotonic() < end, self.text(rank)
            assert self.ranks[rank].poll() is None or words in self.text(rank), self.text(rank)
            time.sleep(0.02)

    def finish(self) -> list[int]:
        """Exit codes, once all have ended."""
        self.end.touch()
        return [rank.wait(PATIENCE_S) for rank in self.ranks]


@pytest.fixture(scope="module")
def hosts() -> Iterator[net_hosts.Hosts]:
    with net_hosts.net_hosts() as made:
        yield made


@contextmanager
def training(
    hosts: net_hosts.Hosts, ranks_of_host: int, folder: Path, watch_s: int = 4
) -> Iterator[World]:
    world = World(hosts, ranks_of_host, folder, watch_s)
    try:
        for rank in range(len(world.ranks)):
            world.wait_for(rank, "ready")
        yield world
    finally:
        for rank in world.ranks:
            rank.kill()
            rank.wait()


def checksums_of_one_host() -> set[str]:
    """What four ranks of this machine make of five steps."""

    def train() -> Report:
        sys.argv = [str(PROGRAM), "5"]
        return Report("ok", f"{runpy.run_path(str(PROGRAM))['crc']:08x}")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment = {"MASTER_PORT": str(free.getsockname()[1])}
    lines: list[str] = []
    outcome = run_forked(train, 4, lines.append, timeout=PATIENCE_S, env=environment)
    assert not outcome.failures, outcome.describe()
    return {report.value for report in outcome.reports if report}


@pytest.mark.parametrize("n", [2, 4])
def test_torchrun_has_the_bits_of_one_host(n: int) -> None:
    """Gloo is all that it needs: no rank has mapped an MPI."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",  # nobody answers there, and torch asks for names
        "FSDPC_TIMEOUT_S": TIMEOUT_S,
    }
    run = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={n}",
           f"--nproc-per-node={4 // n}", f"--master-addr={net_hosts.ADDRESSES[0]}",
           "--master-port=29522"]  # fmt: skip
    with net_hosts.net_hosts(n) as hosts:
        launchers = [
            subprocess.Popen([*inside, *run, f"--node-rank={i}", str(PROGRAM), "5"], text=True,
                             env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for i, inside in enumerate(hosts.inside)
        ]  # fmt: skip
        try:
            output = "".join(launcher.communicate(timeout=PATIENCE_S)[0] for launcher in launchers)
        finally:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
    assert not any(launcher.returncode for launcher in launchers), output
    told = re.findall(r"(\d) hosts, parameters (\w+), MPI (.*)", output)
    (expected,) = checksums_of_one_host()
    assert told == [(str(n), expected, "[]")] * 4, output


def test_a_killed_rank_is_named_on_every_host(hosts: net_hosts.Hosts, tmp_path: Path) -> None:
    with training(hosts, 2, tmp_path) as world:
        world.ranks[3].kill()
        for rank in range(3):
            world.wait_for(rank, f"rank 3 (pid {world.ranks[3].pid}")
            world.wait_for(rank, "died of signal 9")
        assert 0 not in world.finish()


def test_a_host_that_vanishes_is_named(hosts: net_hosts.Hosts, tmp_path: Path) -> None:
    with training(hosts, 1, tmp_path) as world:
        world.ranks[1].kill()
        world.wait_for(0, "node1: rank 1 died")
        assert 0 not in world.finish()


def test_a_cable_that_is_cut(hosts: net_hosts.Hosts, tmp_path: Path) -> None:
    with training(hosts, 1, tmp_path) as world:
        hosts.cable("down")
        try:
            world.wait_for(0, "host node1 (rank 1) is gone or cut off: nothing has reached it")
            world.wait_for(1, "host node0 (rank 0) is gone or cut off: nothing has reached it")
            assert 0 not in world.finish()
        finally:
            hosts.cable("up")


def test_what_is_shorter_than_the_deadline_is_survived(
    hosts: net_hosts.Hosts, tmp_path: Path
) -> None:
    """A stopped rank and a cable that comes back are warned of."""
    with training(hosts, 1, tmp_path, watch_s=100) as world:
        world.ranks[1].send_signal(signal.SIGSTOP)
        world.wait_for(0, "node1: rank 1 has not answered")
        world.ranks[1].send_signal(signal.SIGCONT)
        world.wait_for(0, "node1: rank 1 answers again")
        hosts.cable("down")
        try:
            world.wait_for(1, "node0: rank 0 has not answered")
        finally:
            hosts.cable("up")
        world.wait_for(1, "node0: rank 0 answers again")
        assert world.finish() == [0, 0], world.text(0) + world.text(1)


def test_a_wire_carries_both_directions_at_once(hosts: net_hosts.Hosts, tmp_path: Path) -> None:
    """At 10 Mbit/s a megabyte takes the wire 0.8 s, whatever else this machine does."""
    hosts.shape("10mbit")
    try:
        world = World(hosts, 1, tmp_path, program=PROGRAM.with_name("two_hosts_duplex.py"))
        assert world.finish() == [0, 0], world.text(0) + world.text(1)
    finally:
        hosts.shape("none")
    said = re.search(r"both ways / one way (\S+)", world.text(0))
    assert said, world.text(0)
    assert float(said.group(1)) < 1.5, said.group()
