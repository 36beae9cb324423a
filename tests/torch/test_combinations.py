"""Behaviours together: groups, checkpointing, accumulation, replicas, one rank alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fsdpc
from fsdpc.torch import fully_shard

from .common import Net, average_grads, batch, build, loss_of, shard, twin
from .test_behaviour import assert_same_grads, assert_same_steps, both, end_step


class Checkpointed(Net):
    """Every block twice over: recomputed, and some run again."""

    options: dict[str, Any] = {"use_reentrant": False}
    again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
            if self.again:
                x = checkpoint(block, x, **self.options)
        return self.last(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("grouping", ["each", "pairs", "nested"])
@pytest.mark.parametrize("again", [False, True])
def test_checkpointing_of_groups(reshard: bool, grouping: str, again: bool) -> None:
    model: Any = build(blocks=4)
    plain = twin(model)
    model.__class__ = plain.__class__ = Checkpointed
    model.again = plain.again = again
    options = {"reshard_after_forward": reshard}
    if grouping == "pairs":
        for i in (0, 2):
            fully_shard([model.blocks[i], model.blocks[i + 1]], **options)
    else:
        for block in model.blocks:
            if grouping == "nested":
                fully_shard(block.linear, **options)
            fully_shard(block, **options)
    assert_same_steps(fully_shard(model, **options), plain)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_selective_checkpointing(reshard: bool) -> None:
    model: Any = build()
    plain = twin(model)
    model.__class__ = Checkpointed
    model.options = {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    }
    assert_same_steps(shard(model, reshard_after_forward=reshard), plain)


class Normed(nn.Sequential):
    """Normalisations of every kind, with buffers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(7, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)
        )


@pytest.mark.ranks(2)
def test_norm_modules() -> None:
    torch.manual_seed(0)
    plain = Normed()
    ours: Any = twin(plain)
    for m in ours:
        fully_shard(m)
    fully_shard(ours)
    assert_same_steps(ours, plain)
    for name, buffer in plain.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(batch(0, 0)), plain(batch(0, 0)))


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
            counts = fsdpc._core.trace_counts()
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
        assert fsdpc._core.trace_counts()["reduce"] == 0
        ours.set_is_last_backward(True)
        ours.set_reshard_after_backward(True)
        ours.set_requires_gradient_sync(True)
        for loss in losses.pop(0):
            loss.backward()
        assert fsdpc._core.trace_counts()["reduce"] == 4
        average_grads(plain)
        end_step(ours, plain)


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
        assert ours.blocks[1].linear.weight.shape == (10, 20)  # forward gave it up
        loss.backward()
        assert ours.first.weight.shape == (10, 7)
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
    assert ours.first.weight.shape == (10, 7)


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
def test_a_gradient_penalty_over_units_that_stay() -> None:
    """Second derivatives are right where nothing is given up."""
    model = build()
    plain = twin(model)
    ours = shard(model, reshard_after_forward=False)
    ours.set_reshard_after_backward(False)
    norms = []
    for m in (ours, plain):
        x = batch(0, fsdpc.rank()).requires_grad_()
        (grad,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        norms.append(grad)
    torch.testing.assert_close(norms[0], norms[1])
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2, timeout=40)
def test_a_state_dict_of_rank_0_alone_is_named_on_both() -> None:
    ours = shard(build())
    both(ours, build())
    named = "rank 0 posted all_gather of 'first.weight' .* but rank 1 .*in forward of 'Net'"
    with pytest.raises(fsdpc.PeerError, match=named):
        if fsdpc.rank() == 0:
            ours.state_dict()
        loss_of(ours, batch(0, 0)).backward()
