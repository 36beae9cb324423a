"""Parameters frozen and unfrozen around forwards and backwards: what was trainable then counts.

The unsharded twin of test_units plays all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn

from .test_units import STRATEGIES, batch, check, compare, loss_of, pair, twin_gradients

Run = Callable[[Any, Any], Any]
Work = Callable[[Any, Run, int], None]


def plain(m: Any, x: Any) -> Any:
    return m(x)


def around(m: Any, x: Any) -> Any:
    return fsdpc.sharding.activation.checkpoint(m, x)


def outside(m: Any, x: Any) -> Any:
    """Each unit under a checkpoint of its own."""

    def forward(x: Any) -> Any:
        for block in m.blocks:
            x = fsdpc.sharding.activation.checkpoint(block, x)
        return m.head(x)

    m.forward = forward
    return m(x)


def inside(m: Any, x: Any) -> Any:
    """Checkpoints inside units."""
    for block in m.blocks:
        if "forward" not in block.inner.__dict__:
            usual = block.inner.forward
            block.inner.forward = lambda v, f=usual: fsdpc.sharding.activation.checkpoint(f, v)
    return m(x)


def freeze(m: Any, frozen: bool = True) -> None:
    """A unit with one inside, a part of another, and a part of the root."""
    for part in (m.blocks[0], m.blocks[1].outer, m.head):
        part.requires_grad_(not frozen)


def under(m: Any, run: Run, x: Any) -> None:
    """A forward with the parts frozen, as adapters are for a reference."""
    freeze(m)
    with fsdpc.no_grad():
        run(m, x)
    freeze(m, False)


def reference(m: Any, run: Run, rank: int) -> None:
    loss = loss_of(run(m, batch(rank)))
    under(m, run, batch(rank, 1))
    loss.backward()


def references_of_micro_steps(m: Any, run: Run, rank: int) -> None:
    for number in range(3):
        loss = loss_of(run(m, batch(rank, number)))
        under(m, run, batch(rank, number + 1))
        loss.backward()


def between_backwards(m: Any, run: Run, rank: int) -> None:
    losses = [loss_of(run(m, batch(rank, number))) for number in range(2)]
    losses[0].backward()
    under(m, run, batch(rank, 2))
    losses[1].backward()


def beside_a_frozen_one(m: Any, run: Run, rank: int) -> None:
    loss = loss_of(run(m, batch(rank)))
    freeze(m)
    other = loss_of(run(m, batch(rank, 1)))
    freeze(m, False)
    loss.backward()
    freeze(m)
    other.backward()
    freeze(m, False)


def frozen_for_the_first(m: Any, run: Run, rank: int) -> None:
    freeze(m)
    loss_of(run(m, batch(rank))).backward()
    freeze(m, False)
    loss_of(run(m, batch(rank, 1))).backward()


def frozen_for_the_second(m: Any, run: Run, rank: int) -> None:
    loss_of(run(m, batch(rank))).backward()
    freeze(m)
    loss_of(run(m, batch(rank, 1))).backward()
    freeze(m, False)


WORK: list[Work] = [
    reference,
    references_of_micro_steps,
    between_backwards,
    beside_a_frozen_one,
    frozen_for_the_first,
    frozen_for_the_second,
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", [plain, around, outside, inside])
@pytest.mark.ranks([1, 2])
def test_each_forward_records_what_was_trainable_then(run: Run, strategy: str) -> None:
    for work in WORK:
        model, twin = pair(strategy)
        loss_of(run(model, batch(0))).backward()  # makes the root of the whole
        for _ in range(2):
            model.zero_grad()
            try:
                check(model, twin, lambda m, rank, work=work: work(m, run, rank))
            except AssertionError as error:
                raise AssertionError(f"{work.__name__}: {error}") from error


@pytest.mark.ranks([1, 2])
def test_frozen_by_then() -> None:
    """As in PyTorch, what is frozen when backward comes gets no gradient, sharded or not."""
    model, twin = pair("FULL_SHARD")

    def work(m: Any, rank: int) -> None:
        loss = loss_of(m(batch(rank)))
        freeze(m)
        loss.backward()

    work(model, fsdpc.rank())
    compare(model, twin_gradients(twin, work))
    for m in (model, twin):
        frozen = {name for name, p in m.named_parameters() if not p.requires_grad}
        assert {name for name, p in m.named_parameters() if p.grad is None} == frozen
        assert len(frozen) == 6


def test_each_operation_lets_a_frozen_leaf_be() -> None:
    """Also those with one input, which write its gradient themselves."""
    f = fsdpc.functional
    ids = fsdpc.tensor(np.array([[0, 2]]))
    for use in (
        lambda p: p * p, lambda p: p.tanh(), lambda p: p.sum(), lambda p: p[1:], lambda p: p.T,
        lambda p: f.embedding(ids, p), lambda p: f.linear(p, p), lambda p: p.reshape(-1),
        lambda p: f.rms_norm(p, fsdpc.ones(3)), lambda p: f.softmax(p), lambda p: p.to("bfloat16"),
        lambda p: f.cross_entropy(p, fsdpc.tensor(np.array([0, 1, 2]))), lambda p: f.gelu(p),
    ):  # fmt: skip
        p, q = fsdpc.ones(3, 3, requires_grad=True), fsdpc.ones(1, requires_grad=True)
        y = (use(p).float().sum() * q).sum()
        p.requires_grad = False
        y.backward()
        assert p.grad is None and q.grad is not None
    seen = []
    p = fsdpc.ones(2, requires_grad=True)
    p.register_hook(lambda g: seen.append(g.numpy().copy()))
    y = (p * 2).sum()
    p.requires_grad = False
    y.backward()
    assert p.grad is None and (seen[0] == 2).all()


@pytest.mark.ranks([1, 2])
def test_micro_steps_without_sync() -> None:
    model, twin = pair("FULL_SHARD")
    for work in (references_of_micro_steps, frozen_for_the_first, frozen_for_the_second):
        model.zero_grad()
        with model.no_sync():
            work(model, plain, fsdpc.rank())
        work(model, plain, fsdpc.rank())

        def twice(m: Any, rank: int, work: Work = work) -> None:
            work(m, plain, rank)
            work(m, plain, rank)

        compare(model, twin_gradients(twin, twice))


@pytest.mark.ranks(2)
def test_one_rank_evaluates_frozen_in_hold() -> None:
    model, twin = pair("FULL_SHARD")

    def work(m: Any, rank: int) -> None:
        loss = loss_of(m(batch(rank)))
        if m is model:
            with m.hold():
                if rank == 0:
                    under(m, plain, batch(rank, 1))
        loss.backward()

    check(model, twin, work)


@pytest.mark.ranks([1, 2])
def test_a_gradient_of_an_earlier_micro_step_is_stepped() -> None:
    """Frozen since or not, sharded or not, as PyTorch's optimizers do."""
    fsdpc.manual_seed(3)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[1].load_state_dict(layers[0].state_dict())
    fsdpc.fully_shard(layers[0])
    for layer in layers:
        optimizer = fsdpc.optim.SGD(layer.parameters(), lr=1.0)
        layer(fsdpc.ones(2, 4)).sum().backward()
        layer.weight.requires_grad = False
        assert layer.weight.grad is not None
        optimizer.step()
    ours, theirs = fsdpc.full_tensor(layers[0].weight).numpy(), layers[1].weight.numpy()
    assert (ours == theirs).all() and (ours < -0.9).any()
