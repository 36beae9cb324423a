"""``implicit_replication()`` lets plain tensors, as replicated ones, meet sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from fsdpc.torch import fully_shard

from .common import full

SHAPE = (7, 4)  # uneven on 2 and 4 ranks
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def pair(dim: int = 0) -> tuple[Any, nn.Parameter]:
    """Return a module with a weight sharded along a dimension, and its values."""
    torch.manual_seed(0)
    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    values = nn.Parameter(module.weight.detach().clone())
    return fully_shard(module, shard_placement_fn=lambda p: Shard(dim)), values


@pytest.mark.ranks([1, 2])
def test_optimizers_of_plain_and_sharded_parameters() -> None:
    for name in OPTIMIZERS:
        check_optimizer(name)


def check_optimizer(name: str) -> None:
    module, sharded = pair()
    plain = nn.Parameter(torch.randn(3, 3))
    own = nn.Parameter(plain.detach().clone())
    ours, theirs = OPTIMIZERS[name]([module.weight, plain]), OPTIMIZERS[name]([sharded, own])
    x = torch.randn(5, SHAPE[1])
    for _ in range(3):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        ((module(x) ** 2).sum() + (plain**2).sum()).backward()
        ((nn.functional.linear(x, sharded) ** 2).sum() + (own**2).sum()).backward()
        with implicit_replication():
            norm = torch.nn.utils.clip_grad_norm_([module.weight, plain], 1.0, foreach=True)
            ours.step()
        torch.testing.assert_close(full(norm), torch.nn.utils.clip_grad_norm_([sharded, own], 1.0))
        theirs.step()
    torch.testing.assert_close(full(module.weight), sharded.detach())
    torch.testing.assert_close(plain, own)


@pytest.mark.ranks([1, 2, 4])
def test_rows_meet_their_own_rows() -> None:
    for shape in ((7, 4), (4,), (1, 4), (7, 1), (1,), (), (1, 1)):
        for dim in (0, 1):
            check_rows(shape, dim)


def check_rows(shape: tuple[int, ...], dim: int) -> None:
    module, values = pair(dim)
    sharded, other = module.weight.detach(), torch.randn(shape)
    for op in (torch.add, torch.mul, torch.maximum, torch.true_divide):
        with implicit_replication():
            found = [op(sharded, other), op(other, sharded)]
            lists = torch._foreach_add([sharded, other], [other, other])
        for got, (a, b) in zip(found, ((values, other), (other, values)), strict=True):
            assert isinstance(got, DTensor) and got.shape == SHAPE
            assert torch.equal(full(got), op(a, b))
        assert torch.equal(full(lists[0]), values + other)
        assert type(lists[1]) is torch.Tensor and torch.equal(lists[1], other + other)
    with implicit_replication():
        torch.where(sharded > 0, sharded, other)
        sharded.add_(other).mul_(other)
        torch._foreach_sub_([sharded], [other])
        sharded.lerp_(other.expand(SHAPE), 0.5)
    expected = ((values + other) * other - other).lerp(other.expand(SHAPE), 0.5)
    torch.testing.assert_close(full(module.weight), expected)
    with implicit_replication():
        sharded.copy_(other)
        assert torch.equal(sharded, other.expand(SHAPE))
    assert torch.equal(full(module.weight), other.expand(SHAPE))


@pytest.mark.ranks([1, 4])
def test_other_shapes_and_operations_are_torchs() -> None:
    module, values = pair()
    sharded, other = module.weight.detach(), torch.randn(2, *SHAPE)
    x = torch.randn(3, SHAPE[1])
    with implicit_replication():
        assert torch.equal(full(sharded + other), values + other)
        torch.testing.assert_close(full(x @ sharded.T), x @ values.T)
        torch.testing.assert_close(full(torch.cat([sharded, x])), torch.cat([values, x]))
        with pytest.raises((RuntimeError, AssertionError)):  # by torch's dispatch
            sharded + torch.ones(3)
        plain = torch.zeros(SHAPE)
        for write in (plain.add_, lambda t: torch._foreach_add_([plain], [t])):
            with pytest.raises(RuntimeError, match=r"add_ writes into a plain .* 'Linear.weight'"):
                write(sharded)
    assert not plain.any()


@pytest.mark.ranks(2)
def test_outside_they_are_refused() -> None:
    module, _ = pair()
    with implicit_replication():
        pass
    for other in (torch.ones(SHAPE), torch.ones(4)):
        with pytest.raises(RuntimeError, match="mixed"):
            module.weight.detach() + other
        with pytest.raises(RuntimeError, match="mixed"):
            torch._foreach_add([module.weight.detach()], [other])
