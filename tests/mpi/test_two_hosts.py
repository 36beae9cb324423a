"""Ranks on two hosts (namespaces of this machine), started by mpirun and mpiexec."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.needs import need_hosts, need_mpi

from .test_transport_mpi import COMPILERS, ROOT, mpi_build

sys.path.insert(0, str(ROOT / "tools"))
import net_hosts  # noqa: E402

PACKAGE = ROOT / "python" / "fsdpc"
PROGRAM = Path(__file__).with_name("train.py")
TIMEOUT_S = 120
LEAST_BYTES = 5 * 3 * (4192 // 2) * 4  # steps; a gather and two reductions; half the parameters
HOSTS = ",".join(net_hosts.ADDRESSES[:2])

need_hosts()

Start = Callable[..., subprocess.CompletedProcess[str]]


def command_of(family: str, hosts: net_hosts.Hosts, *given: str) -> list[str]:
    """Start four ranks, two on each host; they are given these variables too."""
    compiler = Path(COMPILERS[family])
    launcher = str(compiler.with_name(compiler.name.replace("mpicc", "mpiexec")))
    if family == "mpich":
        return [launcher, "-launcher", "ssh", "-launcher-exec", str(hosts.agent), "-iface", "v0",
                "-hosts", HOSTS, "-ppn", "2", "-n", "4"]
    network = net_hosts.ADDRESSES[0].rpartition(".")[0] + ".0/24"
    names = ["FSDPC_TIMEOUT_S", "OMP_NUM_THREADS", *given]
    names += [name for name in ("PYTHONPATH",) if name in os.environ]
    exported = [word for name in names for word in ("-x", name)]
    return [launcher, "--mca", "plm_rsh_agent", str(hosts.agent), "--mca", "btl", "tcp,self",
            "--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network,
            "--host", HOSTS.replace(",", ":2,") + ":2", "-n", "4", "--bind-to", "none", *exported]


@pytest.fixture(scope="module")
def hosts() -> Iterator[net_hosts.Hosts]:
    with net_hosts.net_hosts() as made:
        yield made


@pytest.fixture(scope="module", params=mpi_build.FAMILIES)
def start(request: pytest.FixtureRequest, hosts: net_hosts.Hosts) -> Start:
    need_mpi(request.param)
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "FSDPC_TIMEOUT_S": "60",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*hosts.inside[0], *command_of(request.param, hosts), sys.executable]
        return subprocess.run([*command, str(PROGRAM), *words], capture_output=True, text=True,
                              timeout=TIMEOUT_S, env=environment)

    return run


def sums_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MPI_Finalize" not in done.stderr, done.stderr  # its deadline did not end them
    return [word for word in done.stdout.split() if word.startswith("crc:")]


@functools.cache
def sum_of_one_host() -> str:
    """What ranks of one host come to."""
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "4", str(PROGRAM), "launcher"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    return sums_of(done)[0]


def test_bits_are_those_of_one_host(start: Start) -> None:
    assert sums_of(start("launcher")) == [sum_of_one_host()] * 4


def test_a_wire_of_10_mbit(start: Start, hosts: net_hosts.Hosts) -> None:
    hosts.shape("10mbit")
    before = hosts.sent_bytes()
    try:
        assert sums_of(start("launcher")) == [sum_of_one_host()] * 4
    finally:
        hosts.shape("none")
    assert hosts.sent_bytes() - before > LEAST_BYTES, "it did not take the wire"
