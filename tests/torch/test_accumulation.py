"""Gradients of several micro-steps: no_sync, replicas, a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

import fsdpc
from tests.events import event_counts

from .common import (
    assert_same_grads,
    average_grads,
    batch,
    build,
    end_step,
    loss_of,
    shard,
    twin,
)


@pytest.mark.ranks(2)
def test_no_sync() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    counts = []
    for micro in range(3):
        ours.set_requires_gradient_sync(micro == 2)
        fsdpc._core.trace_reset()
        x = batch(0, fsdpc.rank(), micro)
        loss_of(ours, x).backward()
        loss_of(plain, x).backward()
        counts.append(event_counts()["reduce"])
        assert (ours.last.weight.grad is None) == (micro < 2)
    assert counts == [0, 0, 4]
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(4)
def test_accumulation_over_replicas() -> None:
    """Micro-steps reduce within the shard group alone; the last one sums over replicas."""
    model = build()
    plain = twin(model)
    ours = shard(model, mesh=fsdpc.init_device_mesh("cpu", (2, 2)))
    units = 4
    for _ in range(2):
        for micro in range(3):
            ours.set_requires_all_reduce(micro == 2)
            fsdpc._core.trace_reset()
            x = batch(0, fsdpc.rank(), micro)
            for m in (ours, plain):
                loss_of(m, x).backward()
            counts = event_counts()
            assert counts["reduce"] == units
            assert counts["all_reduce"] == (units if micro == 2 else 0)
            assert (ours.last.weight.grad is None) == (micro < 2)
        average_grads(plain)
        end_step(ours, plain)


@pytest.mark.ranks(2)
def test_micro_batches_of_a_pipeline() -> None:
    """One forward, one backward in turns, as 1F1B runs them: what is kept and reduced when."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    for _ in range(2):
        ours.set_is_last_backward(False)
        ours.set_reshard_after_backward(False)
        ours.set_requires_gradient_sync(False)
        losses: list[Any] = []
        fsdpc._core.trace_reset()
        for micro in range(4):
            losses.append([loss_of(m, batch(0, fsdpc.rank(), micro)) for m in (ours, plain)])
            if micro >= 1:
                for loss in losses.pop(0):
                    loss.backward()
        assert event_counts()["reduce"] == 0
        ours.set_is_last_backward(True)
        ours.set_reshard_after_backward(True)
        ours.set_requires_gradient_sync(True)
        for loss in losses.pop(0):
            loss.backward()
        assert event_counts()["reduce"] == 4
        average_grads(plain)
        end_step(ours, plain)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_unit_that_only_earlier_backwards_used(deterministic: bool) -> None:
    fsdpc.init(deterministic=deterministic)
    model = build()
    plain = twin(model)
    ours = shard(model)
    for micro in range(2):
        ours.set_requires_gradient_sync(micro == 1)
        x = batch(micro, fsdpc.rank())
        if micro == 0:
            losses = [loss_of(m, x) for m in (ours, plain)]
        else:
            losses = [loss_of(m.blocks[0], x.repeat(1, 3)[:, :20]) for m in (ours, plain)]
        for loss in losses:
            loss.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)
