"""simulate against real runs: its record is the schedule of one, its memory that of one."""

from __future__ import annotations

from math import prod

import pytest

import fsdpc
from fsdpc.models import Llama
from fsdpc.planning.played import play_step
from fsdpc.planning.schedule import Act, Schedule, Use

from .common import CONFIG, batch, build
from .test_strategies import variants

CLUSTER = {"hosts": 1, "bandwidth": 1e9, "latency": 0.0, "flops": 1e9}
KINDS = ("gather", "forward", "backward", "reshard", "reduce", "all_reduce")


def schedule_of(simulation: fsdpc.Simulation, shards: int) -> Schedule:
    """The record of a simulated step as :func:`fsdpc.schedule` shows a real one."""
    record = simulation.record
    events = [e for e in record.events if e.kind in KINDS]
    if shards == 1:
        events = [e for e in events if e.kind not in ("gather", "reshard", "reduce")]
    acts = tuple(
        Act(record.units[e.unit], e.kind, "backward" if e.backward else "forward") for e in events
    )
    uses = tuple(Use(a.unit, a.phase) for a in acts if a.what == a.phase)
    return Schedule(uses, 1, acts)


@pytest.mark.ranks([2, 4])
def test_record_is_the_schedule_of_a_run() -> None:
    for name, options in variants().items():
        model = build(True, **options)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        for step in range(3):
            model(*batch(step, fsdpc.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        real = fsdpc.schedule(model)
        replicate, shards = model._fsdpc_unit.mesh_shape
        with fsdpc.deferred_init():
            other = Llama(CONFIG)
        found = fsdpc.simulate(
            other, (2, 17), ranks_per_host=fsdpc.world_size(), mesh=(replicate, shards),
            strategy=model._fsdpc_strategy,
            reshard_after_forward=options.get("reshard_after_forward"), **CLUSTER,
        )  # fmt: skip
        assert real is not None and real.acts, name
        assert not real.diff(schedule_of(found, shards)), name


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mesh", [(1, 6), (6, 1), (2, 3), (1, 16384), (16384, 1), (128, 128)])
def test_plan_is_what_the_record_held(mesh: tuple[int, int]) -> None:
    """For every strategy, in worlds that are not here."""
    strategies = ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
    if mesh[0] == 1:
        strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM"]
    elif mesh[1] == 1:
        strategies = ["NO_SHARD"]
    with fsdpc.deferred_init():
        model = Llama(CONFIG)
    for strategy in strategies:
        found = fsdpc.simulate(
            model, (2, 17), mesh=mesh, ranks_per_host=prod(mesh), strategy=strategy, **CLUSTER
        )
        held = found.record.memory
        plan = found.memory
        for category in ("unsharded", "master", "grad", "state", "reduce"):
            assert getattr(plan, category) == held[category], (strategy, category)
        assert plan.activation == held["activation"] > 0


def test_memory_is_that_of_its_hosts() -> None:
    with fsdpc.deferred_init():
        model = Llama(CONFIG)
    plan = fsdpc.memory_plan(model, 8)
    found = {
        hosts: fsdpc.simulate(
            model, (2, 17), ranks_per_host=8 // hosts, device="cpu", **CLUSTER | {"hosts": hosts}
        ).memory.reduce
        for hosts in (1, 2, 4, 8)
    }
    assert found == {hosts: plan.for_hosts(hosts).reduce for hosts in found}
    assert len(set(found.values())) == 4


@pytest.mark.ranks(2)
def test_ranks_need_not_meet() -> None:
    """A rank simulates its own world's size alone, though it has joined the others."""
    fsdpc.barrier()
    if fsdpc.rank() == 0:
        with fsdpc.deferred_init():
            model = Llama(CONFIG)
        record = play_step(model, (2, 17), (1, 2), {}, optimizer="sgd", accumulate=1, orders=False)
        assert record.flops > 0
    assert fsdpc.all_reduce(1.0) == 2.0
