"""Terms of a loss over parameters themselves: built before a forward, in between or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import fully_shard

from .common import (
    Net,
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    end_step,
    every_one,
    full,
    loss_of,
    no_all_reduce,
    no_sync,
    no_wait,
    shard,
    twin,
)


def whole(t: torch.Tensor) -> torch.Tensor:
    """A term of a loss: the value of a DTensor, which autograd tracks; collective."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def penalty(m: nn.Module) -> torch.Tensor:
    return sum((whole(p.pow(2).sum()) for p in m.parameters()), torch.zeros(()))


def x_of(number: int) -> torch.Tensor:
    return batch(0, fsdpc.rank(), number)


def before(m: Any, number: int) -> torch.Tensor:
    term = penalty(m)
    return term + loss_of(m, x_of(number))


def after(m: Any, number: int) -> torch.Tensor:
    loss = loss_of(m, x_of(number))
    return loss + penalty(m)


def between(m: Any, number: int) -> torch.Tensor:
    first, term, second = loss_of(m, x_of(number)), penalty(m), loss_of(m, x_of(number + 1))
    return first + term + second


def twice(m: Any, number: int) -> torch.Tensor:
    term = penalty(m)
    loss = loss_of(m, x_of(number))
    return loss + term + 0.5 * penalty(m)


def recomputed(m: Any, number: int) -> torch.Tensor:
    term = penalty(m)
    y = checkpoint(m, x_of(number).requires_grad_(), use_reentrant=True)
    z = checkpoint(m, x_of(number), use_reentrant=False)
    return (y**2).mean() + (z**2).mean() + term


def of_some(m: Any, number: int) -> torch.Tensor:
    """Of one parameter of a unit, and of one that forward does not use."""
    term = m.blocks[0].linear.weight.square().sum() + m.unused.square().sum()
    return whole(term) + loss_of(m, x_of(number))


LOSSES: list[Callable[[Any, int], torch.Tensor]] = [
    before,
    after,
    between,
    twice,
    recomputed,
    of_some,
]


#: How micro-steps sync, and how many there are.
PREPARED = [
    (every_one, 1),
    *((prepare, 3) for prepare in (no_sync, no_all_reduce, no_wait, every_one)),
]


def pair(**options: Any) -> tuple[Any, Any]:
    model: Any = build(blocks=2)
    model.unused = nn.Parameter(torch.ones(3, 2))
    model.blocks.append(nn.Linear(4, 3))  # a unit that forward leaves out
    model.__class__ = LeavesOut
    plain = twin(model)
    return shard(model, **options), plain


class LeavesOut(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.last(x)


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_each_order_gives_the_same(reshard: bool) -> None:
    mesh = fsdpc.init_device_mesh("cpu", (2, 2)) if fsdpc.world_size() == 4 else None
    for loss in LOSSES if mesh is None else (between, recomputed):
        ours, plain = pair(mesh=mesh, reshard_after_forward=reshard)
        for prepare, micro_steps in PREPARED:
            for number in range(micro_steps):
                prepare(ours, number == micro_steps - 1)
                for m in (ours, plain):
                    loss(m, number).backward()
            average_grads(plain)
            end_step(ours, plain)


#: Functions of sums over whole parameters, of which each rank has some rows.
OF_SUMS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda m: penalty(m),
    "linear": lambda m: sum(p.sum() for p in m.parameters()),
    "mean": lambda m: sum((p**2).mean() for p in m.parameters()),
    "own mean": lambda m: sum(torch.mean(p) for p in m.parameters()) ** 2,
    "norms": lambda m: sum((p + 1).pow(2).sum().sqrt() for p in m.parameters()),
    "own norms": lambda m: sum(p.norm() for p in m.parameters() if p.any()),
    "vector norms": lambda m: sum(torch.linalg.vector_norm(p + 1, 3) for p in m.parameters()),
    "global norm": lambda m: penalty(m).sqrt(),
    "distance": lambda m: sum((p - 0.5).abs().sum() ** 1.5 for p in m.parameters()),
    "cast": lambda m: sum(p.double().square().sum(dtype=torch.float64) for p in m.parameters()),
    "of one": lambda m: m.first.weight[3].square().sum() + m.first.bias[-1] ** 2,
    "of columns": lambda m: m.first.weight.norm(dim=0).sum(),
    "of a product": lambda m: (m.first.weight @ m.first.weight.T).square().sum(),
    "of a ratio": lambda m: m.first.weight.square().sum() / m.last.weight.abs().mean(),
    "of maxima": lambda m: sum(p.amax(0).sum() for p in m.parameters() if p.ndim == 2),
}


@pytest.mark.ranks([1, 2, 4])
def test_values_and_gradients_are_of_the_whole() -> None:
    mesh = fsdpc.init_device_mesh("cpu", (2, 2)) if fsdpc.world_size() == 4 else None
    ours, plain = pair(mesh=mesh)
    for term in OF_SUMS.values():
        values = []
        for m in (ours, plain):
            value = whole(term(m))
            values.append(value.detach())
            (value + loss_of(m, x_of(0))).backward()
        torch.testing.assert_close(values[0], values[1])
        average_grads(plain)
        end_step(ours, plain)


@pytest.mark.ranks([1, 2])
def test_unused_parameters_times_nothing() -> None:
    """A line of programs for DDP, which is not needed here."""
    ours, plain = pair()
    for m in (ours, plain):
        (loss_of(m, x_of(0)) + 0.0 * whole(sum(p.sum() for p in m.parameters()))).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_parameters_of_uneven_rows_can_be_mixed() -> None:
    torch.manual_seed(0)
    ours = fully_shard(nn.Linear(7, 7))
    ours(torch.ones(2, 7)).sum().backward()
    assert ours.bias.fsdpc.rows == ((0, 4), (4, 7))[fsdpc.rank()]
    for mix in (lambda w, b: w * b, lambda w, b: b + w, lambda w, b: torch.lerp(w, b, 0.5)):
        values = full(ours.weight), full(ours.bias)
        torch.testing.assert_close(full(mix(ours.weight, ours.bias)), mix(*values))
        leaves = [v.requires_grad_() for v in values]
        ours.zero_grad()
        mix(ours.weight, ours.bias).square().sum().backward()
        mix(*leaves).square().sum().backward()
        for p, leaf in zip((ours.weight, ours.bias), leaves, strict=True):
            torch.testing.assert_close(full(p.grad), leaf.grad)
    (ours.weight * ours.weight).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("native", [True, False])
def test_steps(native: bool) -> None:
    """Norms are those of the whole, also of units that only the penalty reaches."""
    for loss in LOSSES:
        step_by(loss, fsdpc.torch.optim.AdamW if native else torch.optim.AdamW)


def step_by(loss: Callable[[Any, int], torch.Tensor], kind: Any) -> None:
    ours, plain = pair()
    optimizers = [kind(ours.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)]
    for _ in range(3):
        norms = []
        for number in range(2):
            for m in (ours, plain):
                loss(m, number).backward()
        average_grads(plain)
        for m, optimizer in zip((ours, plain), optimizers, strict=True):
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(full(norms[0]), norms[1])
    assert_same_parameters(ours, plain)


class Cast(torch.nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.bfloat16()).float()


@pytest.mark.ranks(2)
def test_in_half_precision() -> None:
    """Of bf16 parameters, whose gradients are bf16 copies of fp32 sums."""
    for loss in (before, after, twice):
        plain = build().bfloat16()
        ours = shard(twin(plain))
        for number in range(3):
            for m in (ours, plain):
                loss(Cast(m), number).backward()
        average_grads(plain)
        assert_same_grads(ours, plain, rtol=0.05, atol=0.05, check_dtype=False)
        assert ours.last.weight.grad.dtype is torch.bfloat16


@pytest.mark.ranks([1, 2])
def test_second_derivatives_are_dropped_with_the_graph() -> None:
    """create_graph: gradients that are handed out are values."""
    ours, plain = pair(reshard_after_forward=False)
    ours.set_reshard_after_backward(False)
    for m in (ours, plain):
        before(m, 0).backward(create_graph=True)
        assert m is plain or not m.first.weight.grad.requires_grad
    with torch.no_grad():
        average_grads(plain)
    assert_same_grads(ours, plain)
    for p in plain.parameters():
        p.grad = None


@pytest.mark.ranks([1, 2])
def test_a_failed_backward_leaves_what_was_before() -> None:
    ours, plain = pair()
    for m in (ours, plain):
        loss_of(m, x_of(0)).backward()
    average_grads(plain)
    kept = [p.grad for p in ours.parameters()]

    def stop(grad: torch.Tensor) -> None:
        raise KeyError("in backward")

    term = penalty(ours)
    x = x_of(1).requires_grad_()
    x.register_hook(stop)
    loss = term + loss_of(ours, x)
    with pytest.raises(KeyError):
        loss.backward()
    del loss, term
    ours.reset_iter_state()
    assert all(p.grad is g for p, g in zip(ours.parameters(), kept, strict=True))


@pytest.mark.ranks(2)
def test_a_penalty_of_frozen_parameters() -> None:
    plain = build()
    ours = twin(plain)
    for m in (ours, plain):
        m.first.weight.requires_grad_(False)
    for block in ours.blocks:
        fully_shard(block)
    fully_shard(ours)
    for number in range(2):
        for m in (ours, plain):
            before(m, number).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks([1, 2, 3])
def test_gradients_of_ranks_losses_are_averaged() -> None:
    """Each rank's loss weights the penalty differently, as a number of tokens may."""
    ours, plain = pair()
    weight = float(fsdpc.rank() + 1)
    mean = (fsdpc.world_size() + 1) / 2
    for of in (lambda p: p.full_tensor(), lambda p: (p**2).sum().full_tensor()):
        for p in ours.parameters():
            p.grad = None
            (weight * of(p)).sum().backward()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            leaf = q.detach().clone().requires_grad_()
            value = leaf if of(p).dim() else (leaf**2).sum()
            (mean * value).sum().backward()
            torch.testing.assert_close(whole(p.grad), leaf.grad)
