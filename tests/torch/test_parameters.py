"""Parameters of all kinds: uneven, frozen, tied, unused, ignored, with hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import (
    fully_shard,
)

from .common import (
    Block,
    Net,
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    both,
    build,
    end_step,
    full_parameters,
    loss_of,
    shard,
    twin,
)


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("shape", [(5, 3), (16, 15), (7, 15), (15, 3), (1, 4)])
def test_uneven_shapes(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0])
    ours = fully_shard(twin(plain))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, plain)]
    for step in range(3):
        x = torch.randn(4, shape[1], generator=torch.Generator().manual_seed(step + fsdpc.rank()))
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            if model is plain:
                average_grads(plain)
            optimizer.step()
    assert_same_parameters(ours, plain)


@pytest.mark.ranks(2)
def test_frozen_and_unfrozen_later() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for m in (ours, plain):
        for p in m.blocks[1].parameters():
            p.requires_grad_(False)
        m.first.weight.requires_grad_(False)
    for step in range(4):
        if step == 2:
            for m in (ours, plain):
                for p in m.parameters():
                    p.requires_grad_(True)
        both(ours, plain, step)
        end_step(ours, plain)


class Tied(nn.Module):
    """A head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = Block(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


@pytest.mark.ranks(2)
def test_tied_parameters() -> None:
    torch.manual_seed(0)
    plain = Tied()
    ours = twin(plain)
    fully_shard(ours.block)
    fully_shard(ours)
    assert ours.head.weight is ours.embed.weight
    ids = torch.arange(5) + fsdpc.rank()
    for m in (ours, plain):
        m(ids).square().mean().backward()
    average_grads(plain)
    assert_same_grads(ours, plain)
    other = Tied()
    fully_shard(other.embed)
    with pytest.raises(ValueError, match=r"'head.weight' is sharded already"):
        fully_shard(other)


@pytest.mark.ranks(2)
def test_unused_parameters_have_no_gradient() -> None:
    class Branch(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.blocks[fsdpc.rank() if self.training else 0](x)

    model: Any = build()
    model.__class__ = Branch
    plain = twin(model)
    ours = fully_shard(model)
    for m in (ours, plain):
        m.eval()
    both(ours, plain)
    assert_same_grads(ours, plain)
    ours.zero_grad()
    ours.train()
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    assert ours.blocks[0].linear.weight.grad is not None
    assert ours.blocks[1].linear.weight.grad is not None
    assert ours.blocks[2].linear.weight.grad is None


@pytest.mark.ranks(2)
def test_hooks_of_sharded_parameters_run_after_reduction() -> None:
    """An optimizer in backward takes the same steps to the bit."""
    results = []
    for in_backward in (False, True):
        ours = shard(build())
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in ours.parameters()}
        if in_backward:
            for p in ours.parameters():
                p.register_post_accumulate_grad_hook(
                    lambda p, o=optimizers: (o[p].step(), o[p].zero_grad())[0]
                )
        for step in range(3):
            loss_of(ours, batch(step, fsdpc.rank())).backward()
            if not in_backward:
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
        results.append(full_parameters(ours))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.ranks(2)
def test_ignored_parameters() -> None:
    torch.manual_seed(0)
    model = build()
    keep = model.last.weight
    ours = fully_shard(model, ignored_params={keep})
    assert ours.last.weight is keep and keep.shape == (5, 20)
    loss_of(ours, batch(0, 0)).backward()
    assert keep.grad.shape == (5, 20)
    names = set(ours.state_dict())
    assert "last.weight" in names
