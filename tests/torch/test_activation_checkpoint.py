"""Recomputed forwards: of blocks, of groups, inside and around units, selective."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fsdpc
from fsdpc.torch import fully_shard

from .common import (
    Block,
    Checkpointed,
    Net,
    assert_same_steps,
    average_grads,
    batch,
    build,
    end_step,
    loss_of,
    shard,
    twin,
)


class InnerCheckpointed(Block):
    """A unit that checkpoints what is inside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["reentrant", "not", "inside", "root"])
@pytest.mark.parametrize("reshard", [True, False])
def test_activation_checkpointing(kind: str, reshard: bool) -> None:
    model: Any = build()
    plain = twin(model)
    if kind == "inside":
        for block in model.blocks:
            block.__class__ = InnerCheckpointed
    elif kind != "root":
        model.__class__ = Checkpointed
        model.reentrant = kind == "reentrant"
    ours = shard(model, reshard_after_forward=reshard)
    for step in range(3):
        x = batch(step, fsdpc.rank())
        y = checkpoint(ours, x, use_reentrant=False) if kind == "root" else ours(x)
        (y**2).mean().backward()
        loss_of(plain, x).backward()
        average_grads(plain)
        end_step(ours, plain)


class CheckpointedGroups(Net):
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
    model.__class__ = plain.__class__ = CheckpointedGroups
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
    model.__class__ = CheckpointedGroups
    model.options = {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    }
    assert_same_steps(shard(model, reshard_after_forward=reshard), plain)
