"""Where the backward of a unit ends: at inputs that others read, that are kept, or asked about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdpc
from fsdpc.torch import fully_shard

from .common import assert_same_grads, average_grads, batch, loss_of, twin


class Reads(nn.Module):
    """What units read of one tensor, in the ways that marks tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 8)
        self.q, self.k, self.v, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.seen: list[list[bool]] = []

    def forward(self, x: torch.Tensor, mine: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x) if mine is None else mine
        q, k, v = self.q(h), self.k(h), self.v(h)
        for t in (q, k):
            t.register_hook(self.note)
        return self.last((q * k).tanh() + v) + self.last(h)

    def note(self, grad: torch.Tensor) -> None:
        """Which of them are gathered when the backward of another begins."""
        units = (self.q, self.k, self.v)
        self.seen.append([not isinstance(m.weight, DTensor) for m in units])


def reads(shard_it: bool) -> Any:
    torch.manual_seed(3)
    model = Reads()
    for unit in (model.q, model.k, model.v, model.last, model) if shard_it else ():
        fully_shard(unit)
    return model


@pytest.mark.ranks(2)
def test_units_that_read_one_tensor_end_one_by_one() -> None:
    ours, plain = reads(True), reads(False)
    for step in range(2):
        x = batch(step, fsdpc.rank())
        ours.seen.clear()
        loss_of(ours, x).backward()
        loss_of(plain, x).backward()
        average_grads(plain)
        assert_same_grads(ours, plain)
        if step:  # in the order of the first
            assert [s.count(True) for s in ours.seen] == [0, 0], ours.seen


@pytest.mark.ranks([1, 2])
def test_a_tensor_that_is_read_again_and_again() -> None:
    """What the graph made and the program keeps: two forwards, two backwards, and one for both."""
    ours, plain = reads(True), reads(False)

    def run(model: Any) -> torch.Tensor:
        leaf = batch(0, 0)[:, :4].repeat(1, 2).requires_grad_()
        h = leaf * 2
        losses = [(model(leaf, h) ** 2).mean() for _ in range(3)]
        (losses[0] + losses[1]).backward(retain_graph=True)
        losses[2].backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(run(ours), run(plain))
    average_grads(plain)
    assert_same_grads(ours, plain)


class Energy(nn.Module):
    """Uses the gradient of its own energy with respect to an input, or to what that was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.made_of: list[torch.Tensor] = []

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        energy = nn.functional.linear(h, self.w).tanh().sum()
        (force,) = torch.autograd.grad(energy, self.made_of or h, create_graph=True)
        return nn.functional.linear(h, self.v).sum(-1) + force.sum(-1)  # of whole parameters still


class Field(nn.Module):
    def __init__(self, upstream: bool) -> None:
        super().__init__()
        self.embed, self.energy, self.upstream = nn.Linear(7, 8), Energy(), upstream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.energy.made_of[:] = [x.requires_grad_()] if self.upstream else []
        return self.energy(self.embed(x))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("upstream", [False, True])
def test_a_gradient_that_forward_itself_asks_for(upstream: bool) -> None:
    torch.manual_seed(7)
    ours: Any = Field(upstream)
    plain = twin(ours)
    fully_shard(ours.energy)
    fully_shard(ours)
    for step in range(2):
        x = batch(step, fsdpc.rank())
        torch.testing.assert_close(ours(x.clone()), plain(x.clone()))
        for model in (ours, plain):
            loss_of(model, x.clone()).backward()
        average_grads(plain)
        assert_same_grads(ours, plain)
        for model in (ours, plain):
            model.zero_grad()
