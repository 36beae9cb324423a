"""Exceptions that a program catches: what micro-steps have left is there afterwards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc

from .common import (
    Block,
    Net,
    assert_same_grads,
    average_grads,
    batch,
    build,
    end_step,
    every_one,
    loss_of,
    no_all_reduce,
    no_sync,
    no_wait,
    shard,
    twin,
)


def bad_shape(m: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        m(torch.randn(4, 8))


def in_evaluation(m: Any) -> None:
    m.eval()
    with torch.no_grad():
        m(batch(1, fsdpc.rank()))
        bad_shape(m)
    m.train()


def in_inference_mode(m: Any) -> None:
    with torch.inference_mode():
        bad_shape(m)


def inside_a_unit(m: Any) -> None:
    def stop(*_: Any) -> None:
        raise KeyError("in forward")

    handle = m.blocks[1].linear.register_forward_hook(stop)
    with pytest.raises(KeyError):
        loss_of(m, batch(1, fsdpc.rank()))
    handle.remove()


def interrupted(m: Any) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = m.blocks[2].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss_of(m, batch(1, fsdpc.rank()))
    handle.remove()


FAILS: list[Callable[[Any], None]] = [
    bad_shape,
    in_evaluation,
    in_inference_mode,
    inside_a_unit,
    interrupted,
]


def micro_step(m: Any, number: int) -> None:
    loss_of(m, batch(0, fsdpc.rank(), number)).backward()


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_failed_forward_leaves_what_micro_steps_have(reshard: bool) -> None:
    model = build()
    plain = twin(model)
    mesh = fsdpc.init_device_mesh("cpu", (2, 2)) if fsdpc.world_size() == 4 else None
    ours = shard(model, reshard_after_forward=reshard, mesh=mesh)
    for prepare in (every_one, no_sync, no_all_reduce, no_wait, every_one):
        for number, fails in enumerate(FAILS):
            prepare(ours, number == len(FAILS) - 1)
            fails(ours)
            micro_step(ours, number)
            micro_step(plain, number)
            if number < len(FAILS) - 1:
                fails(ours)
        average_grads(plain)
        end_step(ours, plain)


@pytest.mark.ranks(2)
def test_one_rank_fails_when_all_is_gathered() -> None:
    """Its forward counts for nothing, and what both ranks had before stays."""
    model = build()
    plain = twin(model)
    ours = shard(model, reshard_after_forward=False)

    def stop(*_: Any) -> None:
        raise KeyError("in forward")

    for number in range(3):
        ours.set_requires_gradient_sync(number == 2)
        if number == 1 and fsdpc.rank() == 0:
            handle = ours.register_forward_hook(stop)
            with pytest.raises(KeyError):
                micro_step(ours, number)
            handle.remove()
            continue
        micro_step(ours, number)
        micro_step(plain, number)
    average_grads(plain)
    assert_same_grads(ours, plain)


@contextmanager
def standard_error() -> Iterator[list[str]]:
    """What this rank's process writes there."""
    said: list[str] = []
    usual = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(usual, 2)
            os.close(usual)
            file.seek(0)
            said.append(file.read())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("last", [True, False])
def test_a_failed_backward_drops_them_and_says_so(last: bool) -> None:
    """They were in the buffers that it has half filled."""
    ours = build()
    plain = twin(ours)
    ours = shard(ours)
    ours.set_requires_gradient_sync(False)
    micro_step(ours, 0)
    micro_step(ours, 1)
    ours.set_requires_gradient_sync(last)
    middle: list[torch.Tensor] = []
    handle = ours.blocks[1].register_forward_hook(lambda m, i, o: middle.append(o))
    loss = loss_of(ours, batch(0, fsdpc.rank(), 2))
    handle.remove()

    def stop(grad: torch.Tensor) -> None:
        raise KeyError("in backward")

    middle[0].register_hook(stop)
    with standard_error() as said:
        with pytest.raises(KeyError):
            loss.backward()
        ours.set_requires_gradient_sync(True)
        for number in (3, 4):
            micro_step(ours, number)
            micro_step(plain, number)
            average_grads(plain)
            end_step(ours, plain)
    (text,) = said
    assert text.count("a backward failed, so the gradients that earlier micro-steps of unit") == 1
    assert "call zero_grad() and begin the step again" in text


class Careful(Net):
    """Catches what a unit raises, and goes on without it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            try:
                x = block(x)
            except KeyError:
                x = x + 1
        return self.last(x)


class Fails(Block):
    now = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.now:
            raise KeyError("in forward")
        return y


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_around_it_goes_on(reshard: bool) -> None:
    model: Any = build()
    model.__class__, model.blocks[1].__class__ = Careful, Fails
    plain = twin(model)
    ours = shard(model, reshard_after_forward=reshard)
    for step in range(3):
        for number in range(3):
            ours.set_requires_gradient_sync(number == 2)
            for m in (ours, plain):
                m.blocks[1].now = step == 1 or number == 1
                with torch.no_grad():
                    m(batch(step, fsdpc.rank()))
                micro_step(m, number)
        average_grads(plain)
        end_step(ours, plain)
    assert isinstance(ours.blocks[1].linear, nn.Linear)
