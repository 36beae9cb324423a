"""Native ranks on pretended hosts (fsdpc.testing): the bits of one host, and memory of their own.

No MPI is needed: tests/mpi has the same over it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn
from fsdpc.data import DistributedSampler, GlobalBatchSampler
from fsdpc.distributed import pretend

BETWEEN = ("nothing", "no_sync", "hold")


def trained(
    strategy: str = "FULL_SHARD", dtype: str = "float32", between: str = "nothing"
) -> list[np.ndarray]:
    """All parameters after a few steps of two micro-steps, and what was evaluated between these.

    With "no_sync" the first of two is not reduced; with "hold" each rank evaluates as often as it
    likes after it.
    """
    options: dict[str, Any] = {"strategy": strategy}
    options["mp_policy"] = fsdpc.MixedPrecisionPolicy(param_dtype=getattr(fsdpc, dtype))
    if strategy.startswith("HYBRID"):
        options["mesh"] = fsdpc.init_device_mesh("cpu", (2, 2))
    fsdpc.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
    fsdpc.fully_shard(model[0], **options)
    fsdpc.fully_shard(model, **options)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    rng = np.random.default_rng(fsdpc.rank())
    found = []
    for _ in range(3):
        for micro in range(2):
            with model.no_sync() if between == "no_sync" and micro == 0 else nullcontext():
                y = model(fsdpc.tensor(rng.standard_normal((8, 24)).astype(np.float32)))
                (y * y).mean().backward()
            if between == "hold" and micro == 0:
                with model.hold(), fsdpc.no_grad():
                    for _ in range(1 + fsdpc.rank()):
                        y = model(fsdpc.tensor(np.ones((1, 24), np.float32)))
                found.append(y.bits().copy())
        fsdpc.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with fsdpc.summon_full_params(model):
        return [p.detach().numpy().copy() for p in model.parameters()] + found


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [each.name for each in fsdpc.ShardingStrategy])
def test_bits_are_those_of_one_host(strategy: str, dtype: str) -> None:
    values = {}
    for hosts in (1, 2, 4):
        pretend.on_hosts(hosts)
        fsdpc.init()
        assert fsdpc.distributed.world().hosts == hosts
        for between in BETWEEN:
            values[hosts, between] = trained(strategy, dtype, between)
        fsdpc.shutdown()
    for (hosts, between), found in values.items():
        for ours, theirs in zip(found, values[1, between], strict=True):
            np.testing.assert_array_equal(ours, theirs, f"{hosts} hosts, {between} between")
    for ours, theirs in zip(values[1, "hold"], values[1, "nothing"]):  # it changes nothing
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.ranks(4, init=False)
def test_micro_steps_that_are_no_power_of_two() -> None:
    """Deterministic mode divides by twelve once, on any number of hosts."""
    found = []
    for hosts in (1, 2, 4):
        pretend.on_hosts(hosts)
        fsdpc.init(deterministic=True)
        fsdpc.manual_seed(0)
        model = fsdpc.fully_shard(nn.Linear(24, 40))
        model.set_gradient_divide_factor(12)
        rng = np.random.default_rng(fsdpc.rank())
        for _ in range(3):
            y = model(fsdpc.tensor(rng.standard_normal((8, 24)).astype(np.float32)))
            (y * y).mean().backward()
        found.append(fsdpc.full_grad(model.weight).numpy().tobytes())
        fsdpc.shutdown()
    assert found[0] == found[1] == found[2]


def shared_memory() -> set[str]:
    """The files without names that this rank has mapped shared, by their numbers."""
    return {
        line.split()[4]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if re.search(r" ...s .*/memfd:", line)
    }


@pytest.mark.ranks(4, hosts=2)
def test_hosts_share_no_memory(tmp_path: Path) -> None:
    trained()
    model = nn.Linear(8, 8)
    fsdpc.fully_shard(model)
    model(fsdpc.tensor(np.ones((1, 8), np.float32)))
    (tmp_path / str(fsdpc.rank())).write_text(" ".join(shared_memory()))
    fsdpc.barrier()
    found = [set((tmp_path / str(rank)).read_text().split()) for rank in range(4)]
    assert found[0] & found[1] and found[2] & found[3]
    assert not (found[0] | found[1]) & (found[2] | found[3])


@pytest.mark.ranks(4, hosts=2)
def test_a_rank_knows_its_host() -> None:
    assert fsdpc.local_rank() == fsdpc.rank() % 2
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert fsdpc.all_reduce(fsdpc.rank()) == 6


@pytest.mark.ranks(4, hosts=2)
def test_ranks_of_all_hosts_take_each_sequence_once() -> None:
    place = fsdpc.rank(), fsdpc.world_size()
    for sampler in (
        DistributedSampler(48, *place),
        GlobalBatchSampler(48, *place, batch=3, accumulate=2),
    ):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            taken = fsdpc.all_gather(np.array(list(sampler)))
            assert sorted(taken.ravel().tolist()) == list(range(48))


class Meeting(nn.Module):
    """Two layers; `reached` is called in backward, between their gradients."""

    def __init__(self, reached: Callable[[], None]) -> None:
        super().__init__()
        self.first, self.last, self.reached = nn.Linear(8, 8), nn.Linear(8, 8), reached

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        h = self.first(x)
        h.register_hook(lambda grad: self.reached())
        return self.last(h)


@pytest.mark.ranks(4, hosts=2)
def test_sums_are_sent_on_between_gradients(tmp_path: Path) -> None:
    """Rank 0 is a unit ahead of rank 1, and sends their sums to the other host once both have them,
    in the middle of a unit."""
    rank = fsdpc.rank()

    def say(where: str) -> None:
        (tmp_path / f"{where}{rank}").touch()

    def wait_for(where: str, other: int) -> None:
        end = time.monotonic() + 60
        while not (tmp_path / f"{where}{other}").exists():
            assert time.monotonic() < end
            time.sleep(0.001)

    def in_last() -> None:  # the first in backward
        if rank == 1:
            wait_for("ahead", 0)

    def in_first() -> None:
        say("ahead")
        if rank == 0:
            wait_for("ahead", 1)

    model = nn.Sequential(Meeting(in_first), Meeting(in_last))
    for module in (*model, model):
        fsdpc.fully_shard(module, strategy="HYBRID_SHARD")
    _core.trace_reset()
    model(fsdpc.tensor(np.ones((1, 8), np.float32))).sum().backward()
    units = [(kind, unit) for kind, unit, *_ in _core.trace_events()]
    if rank == 0:
        assert units.index(("all_reduce", 2)) < units.index(("backward_end", 1)), units


@pytest.mark.ranks(4, hosts=2, init=False)
def test_a_failure_reaches_other_hosts() -> None:
    if os.environ["RANK"] == "3":
        fsdpc.init()
        fsdpc.distributed.world().abort("out of disk")
        return
    with pytest.raises(fsdpc.PeerError, match="rank 3: out of disk"):
        fsdpc.init()  # others may not have met all yet
        for _ in range(2):
            fsdpc.barrier()
