"""Backwards that overlap with forwards and each other, fail, wait over a step, or are penalised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    checkpoint,
)

import fsdpc

from .common import (
    ATOL,
    RTOL,
    Net,
    assert_same_grads,
    assert_same_steps,
    average_grads,
    batch,
    both,
    build,
    end_step,
    full,
    loss_of,
    shard,
    twin,
)


@pytest.mark.ranks(2)
def test_several_forwards_before_one_backward() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for m in (ours, plain):
        total = sum(loss_of(m, batch(k, fsdpc.rank())) for k in range(3))
        total.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_backwards_interleaved_with_forwards() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for m in (ours, plain):
        losses = [loss_of(m, batch(k, fsdpc.rank())) for k in range(2)]
        for loss in losses:
            loss.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


class Twice(Net):
    """The first block runs twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.blocks[0](x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.ranks(2)
def test_one_module_twice() -> None:
    model: Any = build()
    model.__class__ = Twice
    plain = twin(model)
    ours = shard(model)
    assert_same_steps(ours, plain)


@pytest.mark.ranks(2)
def test_no_grad_evaluation_between_steps() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        both(ours, plain, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                x = batch(9, 0)
                torch.testing.assert_close(ours(x), plain(x), rtol=RTOL, atol=ATOL)


@pytest.mark.ranks(2)
def test_gradient_penalty_is_refused() -> None:
    ours = shard(build(), reshard_after_forward=True)
    x = batch(0, fsdpc.rank()).requires_grad_()
    y = ours(x).square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"through unit '.*': fsdpc freed .*reshard_after_forward=False"
    ):
        grad.square().sum().backward()


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


@pytest.mark.ranks(2)
def test_exceptions_leave_a_usable_model() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)
    ours.zero_grad()
    plain.zero_grad()
    with pytest.raises(RuntimeError):
        ours(torch.randn(4, 8))

    def stop(grad: torch.Tensor) -> None:
        raise KeyError("in backward")

    middle = []
    handle = ours.blocks[1].register_forward_hook(lambda m, i, o: middle.append(o))
    y = ours(batch(0, fsdpc.rank()))
    handle.remove()
    middle[0].register_hook(stop)
    sharded = list(ours.parameters())
    with pytest.raises(KeyError):
        y.sum().backward()
    assert all(a is b for a, b in zip(ours.parameters(), sharded, strict=True))
    values = ours.state_dict()  # as a script does that saves what it has
    assert all(torch.equal(full(values[name]), p) for name, p in plain.named_parameters())
    both(ours, plain)
    assert_same_grads(ours, plain)


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
