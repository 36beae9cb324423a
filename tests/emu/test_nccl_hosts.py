"""Ranks of several hosts over the fake NCCL: the bits of one host, and who failed on another.

Hosts are pretended (their ranks share no memory, and NCCL is told that they are apart), or are
network namespaces. gloo carries what the engine's control says between them.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from processes import EMULATION_ALONE, ROOT, TIMEOUT_S, last_json
from tests.needs import need_hosts, need_mpi
from training import ON_GPU

sys.path.insert(0, str(ROOT / "tools"))
import mpi_build  # noqa: E402
import net_hosts  # noqa: E402

HERE = Path(__file__).parent
SOON_S = 5.0
COMPILERS = mpi_build.find_compilers()
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD")

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


class Ranks:
    """Ranks on two hosts, each with a GPU of its own; a folder of theirs."""

    def __init__(self, nccl: dict[str, str], folder: Path,
                 inside: Sequence[Sequence[str]] = ()) -> None:
        self.folder, self.inside = folder, inside
        self.environment = {**nccl, "EMU_GPUS": "2", "FAKE_NCCL_VERSION": "22809",
                            "OMP_NUM_THREADS": "1", "FSDPC_TIMEOUT_S": "120",
                            "STORE": str(folder / "store")}
        if not inside:
            self.environment |= {"PRETEND": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run(self, ranks_of_host: int, *words: str, **more: str) -> list[tuple[int, str]]:
        """Let hosts.py run so on every rank; exit code and all that it printed, by rank."""
        started = []
        (self.folder / "store").unlink(missing_ok=True)
        world = range(2 * ranks_of_host)
        places = self.inside or [[]]
        for k, before in enumerate(places):
            here = world[k * len(world) // len(places) : (k + 1) * len(world) // len(places)]
            numbers = {"HERE": " ".join(map(str, here)), "SAID": str(self.folder),
                       "WORLD_SIZE": str(len(world)), "LOCAL_WORLD_SIZE": str(ranks_of_host)}
            started.append(subprocess.Popen(
                [*before, sys.executable, str(HERE / "hosts.py"), *words],
                env={**self.environment, **numbers, **more}, text=True, stdout=subprocess.PIPE,
                preexec_fn=os.setpgrp))  # not a session: who yields yields to none in another
        try:
            ends = [json.loads(place.communicate(timeout=TIMEOUT_S)[0]) for place in started]
        finally:
            for place in started:
                with suppress(ProcessLookupError):
                    os.killpg(place.pid, signal.SIGKILL)
        return [(code, (self.folder / f"said{rank}").read_text())
                for rank, code in enumerate(itertools.chain(*ends))]

    def results(self, ranks_of_host: int, *words: str, **more: str) -> list[Any]:
        """What each rank found."""
        done = self.run(ranks_of_host, *words, **more)
        if ON_GPU and any("does not let them: install 2.30" in text for _, text in done):
            pytest.skip("torch's NCCL lets no ranks share a GPU")
        assert [code for code, _ in done] == [0] * len(done), done
        found = [[line for line in text.splitlines() if not line.startswith("fsdpc rank")]
                 for _, text in done]  # the log may go on behind what was found
        return [json.loads(lines[-1]) for lines in found]


@pytest.fixture
def pretended(nccl: dict[str, str], tmp_path: Path) -> Ranks:
    return Ranks(nccl, tmp_path)


@pytest.fixture
def namespaces(nccl: dict[str, str], tmp_path: Path) -> Iterator[Ranks]:
    need_hosts()
    with net_hosts.net_hosts() as hosts:
        yield Ranks(nccl, tmp_path, hosts.inside)


@pytest.fixture(scope="module")
def on_one_host(nccl: dict[str, str]) -> Callable[[int], list[Any]]:
    """What so many ranks of one host make of every strategy, over NCCL."""

    @functools.cache
    def results(world: int) -> list[Any]:
        program = str(HERE / "ranks.py")
        return last_json(nccl, program, "strategies", "cuda", str(world), "perceptron")

    return results


def test_strategies_have_the_bits_of_one_host(
    pretended: Ranks, on_one_host: Callable[[int], list[Any]]
) -> None:
    results = pretended.results(1, "trained", "perceptron")
    assert all(rank["transport"] == "nccl" for rank in results)
    assert {*STRATEGIES, "HYBRID_SHARD 2x1"} < results[0]["perceptron fp32"].keys()
    assert results == on_one_host(2)


def test_namespaces_have_the_bits_of_one_host(
    namespaces: Ranks, on_one_host: Callable[[int], list[Any]]
) -> None:
    """Of two ranks each, and so with a mesh that shards inside hosts and replicates between."""
    results = namespaces.results(2, "trained", "perceptron")
    assert {*STRATEGIES, "HYBRID_SHARD 2x2"} < results[0]["perceptron fp32"].keys()
    assert results == on_one_host(4)


@pytest.mark.parametrize("family", mpi_build.FAMILIES)
def test_mpi_is_as_good_as_gloo(
    pretended: Ranks, family: str, tmp_path: Path, on_one_host: Callable[[int], list[Any]]
) -> None:
    need_mpi(family)
    compiler = Path(COMPILERS[family])
    launcher = str(compiler.with_name(compiler.name.replace("mpicc", "mpiexec")))
    options = ["--oversubscribe", "--bind-to", "none"] if family == "openmpi" else []
    environment = {**pretended.environment, "LOCAL_WORLD_SIZE": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "RESULTS": str(tmp_path)}
    del environment["STORE"]
    done = subprocess.run([launcher, *options, "-n", "2", sys.executable, str(HERE / "hosts.py"),
                           "trained", "perceptron"], env=environment, capture_output=True,
                          text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert results == on_one_host(2)


def test_gradients_and_weights_go_over_nccl_alone(pretended: Ranks) -> None:
    """The link carries what operations are compared by, and notes."""
    for rank in pretended.results(2, "crossed"):
        assert 0 < rank["sent"] < rank["weights"] / 100, rank


def test_steps_as_graphs(pretended: Ranks) -> None:
    for rank in pretended.results(1, "replays"):
        assert len(rank) == 3
        for strategy, (plain, graph) in rank.items():
            assert graph == plain, strategy


@pytest.mark.parametrize("ranks_of_host", [1, 2])
def test_a_killed_rank_is_named_on_the_other_host(namespaces: Ranks, ranks_of_host: int) -> None:
    """In the reduction of its gradients."""
    end = namespaces.folder / "end"
    last = 2 * ranks_of_host - 1
    done = namespaces.run(ranks_of_host, "death", str(end))
    assert done[last][0] < 0, done
    for rank in range(last):
        text, ended = json.loads(Path(f"{end}-{rank}").read_text())
        assert f"rank {last}" in text and "died" in text, text
        assert ended - float(end.read_text()) < SOON_S, (rank, text)


@pytest.mark.parametrize("watch", ["10", "0"])
def test_who_gave_up_is_named_on_the_other_host(pretended: Ranks, watch: str) -> None:
    """Without a watch too, whose absence leaves the link to say so."""
    *others, _ = pretended.results(2, "aborted", FSDPC_WATCH=watch)
    for text, late in others:
        assert "rank 3: out of disk" in text and late < SOON_S, others


def test_hosts_that_disagree_are_named(pretended: Ranks) -> None:
    messages = pretended.results(2, "disagree")
    for text in messages:
        assert "ranks disagree in operation" in text, messages
        assert "posts all_gather" in text and "posts all_reduce" in text, messages


@pytest.mark.parametrize("more, interface", [
    ({}, None), ({"DESCRIBED": "1"}, None),
    pytest.param({"NCCL_SOCKET_IFNAME": "eth7"}, "eth7", marks=EMULATION_ALONE),
], ids=["fresh", "described", "said"])
def test_nccl_finds_the_interface_itself(pretended: Ranks, more: dict[str, str],
                                         interface: str | None) -> None:
    names = "NCCL_SOCKET_IFNAME,NCCL_LAUNCH_ORDER_IMPLICIT"
    for rank in pretended.results(1, "told", names, **more):
        assert rank == [interface, "1"]


def test_ranks_of_a_host_share_a_gpu_if_nccl_can(pretended: Ranks) -> None:
    transports = [rank[0] for rank in pretended.results(2, "who", EMU_GPUS="1",
                                                        FAKE_NCCL_VERSION="23007")]
    assert transports == ["nccl"] * 4
