"""Parameters outside forward: unshard and reshard, prefetch, full copies, other methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
)

from .common import (
    assert_same_grads,
    average_grads,
    batch,
    both,
    build,
    end_step,
    loss_of,
    shard,
    twin,
)


@pytest.mark.ranks(2)
def test_unshard_and_reshard() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    handle = ours.unshard(async_op=True)
    handle.wait()
    assert torch.equal(ours.first.weight, plain.first.weight)
    assert isinstance(ours.blocks[0], FSDPModule)
    assert ours.blocks[0].linear.weight.to_local().shape == (10, 20)
    ours.reshard()
    assert ours.last.weight.to_local().shape == ((3, 20), (2, 20))[fsdpc.rank()]
    both(ours, plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wait", ["at once", "before", "after", "never"])
def test_unshard_before_each_step_without_reshard(wait: str) -> None:
    """As FSDP2's tutorial does to gather earlier: forward and backward give up what it took."""
    model = build()
    plain = twin(model)
    ours: Any = shard(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ours, plain)]
    for step in range(3):
        handles = [m.unshard(async_op=wait != "at once") for m in (ours, ours.blocks[1])]
        for handle in handles if wait == "before" else []:
            handle.wait()
        x = batch(step, fsdpc.rank())
        loss = loss_of(ours, x)
        for handle in handles if wait == "after" else []:
            handle.wait()
        assert ours.blocks[1].linear.weight.to_local().shape == (10, 20)  # forward gave it up
        loss.backward()
        assert ours.first.weight.to_local().shape == (10, 7)
        loss_of(plain, x).backward()
        average_grads(plain)
        assert_same_grads(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours.unshard()
    ours.unshard()
    assert torch.equal(ours.first(x), ours.first(x))
    ours.reshard()
    assert ours.first.weight.to_local().shape == (10, 7)


@pytest.mark.ranks(2)
def test_unshards_ahead_of_forward() -> None:
    model = build()
    plain = twin(model)
    ours: Any = shard(model)
    for step in range(2):
        handles = [m.unshard(async_op=True) for m in (ours, *ours.blocks)]
        for handle in handles:
            handle.wait()
        x = batch(step, fsdpc.rank())
        loss = loss_of(ours, x)
        for m in (ours, *ours.blocks):
            m.reshard()
        loss.backward()
        loss_of(plain, x).backward()
        average_grads(plain)
        end_step(ours, plain)


@pytest.mark.ranks(2)
def test_prefetch_lists_and_flags() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    ours.set_modules_to_forward_prefetch([ours.blocks[0], ours.blocks[1]])
    ours.blocks[2].set_modules_to_backward_prefetch([ours.blocks[1], ours.blocks[0]])
    ours.set_reshard_after_backward(False)
    ours.blocks[1].set_unshard_in_backward(False)  # a hint: right even where it is wrong
    for step in range(3):
        last = step == 2
        ours.set_is_last_backward(last)
        both(ours, plain, step)
    for p in plain.parameters():
        p.grad.zero_()
    for step in range(3):
        x = batch(step, fsdpc.rank())
        loss_of(plain, x).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_prefetch_distance() -> None:
    """Of the whole model, whoever is asked: before the first forward the outermost, later any."""
    ours = shard(build())
    with pytest.raises(ValueError, match="the prefetch distance is 0 or more, got -1"):
        ours.set_prefetch_distance(-1)
    ours.set_prefetch_distance(2)
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    first = fsdpc.schedule(ours)
    ours.blocks[1].set_prefetch_distance(3)
    second = fsdpc.schedule(ours)
    assert first and second and first.uses == second.uses
    assert (first.prefetch, second.prefetch) == (2, 3)


@pytest.mark.ranks(2)
def test_summon_full_params() -> None:
    ours = shard(build())
    with fsdpc.torch.summon_full_params(ours):
        assert ours.first.weight.shape == (20, 7)
        with torch.no_grad():
            ours.first.weight.fill_(0.5)
    assert (ours.first.weight.full_tensor() == 0.5).all()
    loss_of(ours, batch(0, 0)).backward()


@pytest.mark.ranks(2)
def test_other_forward_methods() -> None:
    class Head(nn.Linear):
        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).square() + self.weight.sum()

    torch.manual_seed(0)
    plain = Head(4, 3)
    ours = fully_shard(twin(plain))
    register_fsdp_forward_method(ours, "score")
    x = torch.ones(2, 4) * (fsdpc.rank() + 1)
    for m in (ours, plain):
        m.score(x).sum().backward()
    average_grads(plain)
    assert_same_grads(ours, plain)
