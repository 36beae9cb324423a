"""Backwards that wait: over steps, beside ones that failed, under checkpoints of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fsdpc

from .common import Net, average_grads, batch, build, loss_of, shard, twin
from .test_behaviour import assert_same_grads, end_step

HOW = {
    "plain": lambda model, x: model(x),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "not": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "around": lambda model, x: checkpoint(lambda x: 2 * model(x * 1) / 2, x, use_reentrant=True),
    "twice": lambda model, x: checkpoint(
        lambda x: checkpoint(model, x * 1, use_reentrant=True), x, use_reentrant=True
    ),
}


def forward(model: Any, how: str, step: int) -> torch.Tensor:
    x = batch(step, fsdpc.rank()).requires_grad_()
    return (HOW[how](model, x) ** 2).mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", HOW)
def test_the_older_of_two_over_a_step_is_refused(how: str) -> None:
    """The newer one is right, and so is what comes after."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]

    def step(number: int) -> None:
        loss_of(plain, batch(number, fsdpc.rank())).backward()
        average_grads(plain)
        assert_same_grads(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    older = forward(ours, how, 0)
    forward(ours, how, 0).backward()
    step(0)
    newer = forward(ours, how, 1)
    with pytest.raises(RuntimeError, match="weights of unit 'Net' changed between forward and"):
        older.backward()
    newer.backward()
    step(1)
    forward(ours, how, 2).backward()
    step(2)


class Fails(torch.autograd.Function):
    """The identity, whose backward fails on request."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fails.now:
            raise KeyError("in backward")
        return grad


class Failing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        return self.last(self.blocks[2](Fails.apply(self.blocks[1](x))))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["plain", "reentrant", "not"])
@pytest.mark.parametrize("reset", [False, True])
def test_one_after_another_that_failed(how: str, reset: bool) -> None:
    """Whatever ranks have reduced of the first is not in the second."""
    model: Any = build()
    model.__class__ = Failing
    plain = twin(model)
    ours = shard(model)
    pending = [forward(ours, how, k) for k in range(2)]
    Fails.now = True
    with pytest.raises(KeyError):
        pending[0].backward()
    Fails.now = False
    if reset:
        ours.reset_iter_state()
    pending[1].backward()
    loss_of(plain, batch(1, fsdpc.rank())).backward()
    average_grads(plain)
    end_step(ours, plain)
    forward(ours, how, 2).backward()
    loss_of(plain, batch(2, fsdpc.rank())).backward()
    average_grads(plain)
    end_step(ours, plain)
