"""What the engine did, counted: gathers, reductions, allocations, one parameter buffer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import fsdpc
from fsdpc import _core
from tests.events import event_counts

from .common import CONFIG, batch, build
from .test_strategies import variants

UNITS = CONFIG.layers + 1


def one_step(model: object, optimizer: object) -> None:
    model(*batch(0, fsdpc.rank())).backward()
    fsdpc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def counts() -> Counter[tuple[str, bool]]:
    return Counter((kind, in_backward) for kind, *_, in_backward in _core.trace_events())


@pytest.mark.ranks([2, 3])
def test_gathers_and_reductions() -> None:
    model = build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for _ in range(3):  # on demand first, then following the record
        _core.trace_reset()
        one_step(model, optimizer)
        seen = counts()
        assert seen["gather", False] == UNITS
        assert seen["gather", True] == UNITS - 1  # the root stays gathered
        assert seen["reduce", True] == UNITS
        assert seen["collective", False] == 1  # the norm


@pytest.mark.ranks(2)
def test_a_unit_whose_backward_is_next_stays_gathered() -> None:
    """Known once a step is recorded; here the root, which is asked to reshard."""
    model = build(sharded=True, reshard_after_forward=True)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for gathers in (UNITS, UNITS - 1, UNITS - 1):
        _core.trace_reset()
        one_step(model, optimizer)
        assert counts()["gather", True] == gathers


@pytest.mark.ranks(2)
def test_keeping_fulls_costs_none() -> None:
    model = build(sharded=True, reshard_after_forward=False)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    _core.trace_reset()
    one_step(model, optimizer)
    assert counts()["gather", True] == 0


@pytest.mark.ranks(1)
def test_a_world_of_one_communicates_nothing() -> None:
    model = build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    _core.trace_reset()
    one_step(model, optimizer)
    seen = event_counts()
    assert seen["gather"] == seen["reduce"] == seen["collective"] == 0
    assert seen["forward"] == seen["backward_end"] == UNITS


@pytest.mark.ranks([1, 2, 4])
def test_steady_steps_ask_the_system_for_nothing() -> None:
    for name, options in variants().items():
        model = build(sharded=True, **options)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        for _ in range(3):
            one_step(model, optimizer)
        before = fsdpc.memory_stats()["system_allocs"]
        for _ in range(3):
            one_step(model, optimizer)
        assert fsdpc.memory_stats()["system_allocs"] == before, name


@pytest.mark.ranks(2)
def test_following_the_record_gathers_ahead() -> None:
    model = build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    _core.trace_reset()
    one_step(model, optimizer)
    order = [(kind, unit) for kind, unit, *_ in _core.trace_events()]
    for unit in range(1, UNITS - 1):
        assert order.index(("gather", unit + 1)) < order.index(("forward_end", unit))


@pytest.mark.ranks(2)
def test_one_copy_of_the_parameter_buffer_per_host() -> None:
    """Shared pages count half for each of two ranks: together once (PSS, not RSS)."""
    model = fsdpc.nn.Sequential(*[fsdpc.nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    for layer in model:
        fsdpc.fully_shard(layer)
    fsdpc.fully_shard(model)
    unsharded = 8 * 4 * 1024 * 1024
    with fsdpc.no_grad():
        x = fsdpc.tensor(np.ones((1, 1024), np.float32))
        model(x)
    shared, ours = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ", 1)[0]:
            ours = "memfd:" in line
        elif ours and line.startswith("Pss:"):
            shared += int(line.split()[1]) * 1024
    total = fsdpc.all_reduce(shared)
    assert unsharded <= total + (1 << 20)
    # beside the parameter buffer: two reduce buffers of one layer on each rank, and control pages
    assert total < unsharded + 2 * 2 * 4 * 1024 * 1024 + (8 << 20)


def test_replicas_on_other_hosts_are_sent_their_sums_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the next unit's backward begins; on one host before its reduction is posted."""
    for hosts in (1, 2):
        monkeypatch.setattr(fsdpc.distributed.group, "_world", _core.Comm(0, 4, None, hosts=hosts))
        mesh = fsdpc.init_device_mesh("cpu", (2, 2))
        model = fsdpc.nn.Sequential(*(fsdpc.nn.Linear(4, 4) for _ in range(3)))
        for module in (*model, model):
            fsdpc.fully_shard(module, mesh=mesh)
        _core.trace_reset()
        model(fsdpc.tensor(np.ones((1, 4), np.float32))).sum().backward()
        units = [(kind, unit) for kind, unit, *_ in _core.trace_events()]
        sent, began = units.index(("all_reduce", 3)), units.index(("backward", 2))
        assert (sent < began) == (hosts == 2), (hosts, units)
        assert sent < units.index(("reduce", 2))
