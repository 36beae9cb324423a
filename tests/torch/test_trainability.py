"""Parameters frozen and unfrozen around forwards and backwards, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import fully_shard

from .common import (
    Block,
    Checkpointed,
    Net,
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    end_step,
    loss_of,
    shard,
    twin,
)


class Inside(Block):
    """A checkpoint inside a unit."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(self.norm(x)))


class Around(Net):
    """A checkpoint around the whole."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


KINDS = [None, *((k, r) for k in (Checkpointed, Inside, Around) for r in (True, False))]


def prepare(kind: Any, **options: Any) -> tuple[Any, Any]:
    """The model and its plain twin, both under the same checkpoints."""
    model: Any = build()
    if kind is not None:
        cls, reentrant = kind
        for m in model.blocks if cls is Inside else [model]:
            m.__class__ = type(cls.__name__, (cls,), {"reentrant": reentrant})
    plain = twin(model)
    return shard(model, **options), plain


def frozen_parts(m: Any) -> list[nn.Module]:
    """A whole unit, a part of one and parts of the root."""
    return [m.blocks[1], m.blocks[2].linear, m.first, m.last]


def freeze(m: Any, frozen: bool = True) -> None:
    for part in frozen_parts(m):
        part.requires_grad_(not frozen)


def x_of(number: int) -> torch.Tensor:
    """With gradients, which reentrant checkpoints need."""
    return batch(0, fsdpc.rank(), number).requires_grad_()


def under(m: Any, context: Any, number: int = 1) -> None:
    """A forward with the parts frozen, as adapters are for a reference."""
    freeze(m)
    with context:
        m(x_of(number))
    freeze(m, False)


def reference(m: Any) -> None:
    loss = loss_of(m, x_of(0))
    under(m, torch.no_grad())
    loss.backward()


def reference_in_inference_mode(m: Any) -> None:
    loss = loss_of(m, x_of(0))
    m.eval()
    under(m, torch.inference_mode())
    m.train()
    loss.backward()


def references_of_micro_steps(m: Any) -> None:
    for number in range(3):
        loss = loss_of(m, x_of(number))
        under(m, torch.no_grad(), number)
        loss.backward()


def between_backwards(m: Any) -> None:
    losses = [loss_of(m, x_of(number)) for number in range(2)]
    losses[0].backward()
    under(m, torch.no_grad())
    losses[1].backward()


def beside_a_frozen_one(m: Any) -> None:
    loss = loss_of(m, x_of(0))
    freeze(m)
    other = loss_of(m, x_of(1))
    freeze(m, False)
    loss.backward()
    freeze(m)
    other.backward()
    freeze(m, False)


def frozen_by_then(m: Any) -> None:
    """As in plain torch, they get no gradient."""
    loss = loss_of(m, x_of(0))
    freeze(m)
    loss.backward()
    freeze(m, False)


def frozen_for_the_first(m: Any) -> None:
    freeze(m)
    loss_of(m, x_of(0)).backward()
    freeze(m, False)
    loss_of(m, x_of(1)).backward()


def frozen_for_the_second(m: Any) -> None:
    loss_of(m, x_of(0)).backward()
    freeze(m)
    loss_of(m, x_of(1)).backward()


WORK: list[Callable[[Any], None]] = [
    reference,
    reference_in_inference_mode,
    references_of_micro_steps,
    between_backwards,
    beside_a_frozen_one,
    frozen_by_then,
    frozen_for_the_first,
    frozen_for_the_second,
]


def run_all(kind: Any, **options: Any) -> None:
    ours, plain = prepare(kind, **options)
    for work in WORK:
        for m in (plain, ours):
            m.requires_grad_(True)
        try:
            work(plain)
        except torch.utils.checkpoint.CheckpointError:
            plain.zero_grad()
            continue  # of a checkpoint that is frozen when it is computed again
        work(ours)
        average_grads(plain)
        try:
            end_step(ours, plain)
        except AssertionError as error:
            raise AssertionError(f"{work.__name__}: {error}") from error


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_forward_records_what_was_trainable_then(kind: Any) -> None:
    run_all(kind)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"reshard_after_forward": False}, (Checkpointed, False)),
        ({"strategy": "SHARD_OPTIM"}, None),
        ({"strategy": "NO_SHARD"}, None),
    ],
)
def test_strategies(options: dict[str, Any], kind: Any) -> None:
    run_all(kind, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("micro", [references_of_micro_steps, frozen_for_the_first])
def test_micro_steps_without_sync(micro: Callable[[Any], None]) -> None:
    ours, plain = prepare(None)
    ours.set_requires_gradient_sync(False)
    micro(ours)
    ours.set_requires_gradient_sync(True)
    micro(ours)
    for _ in range(2):
        micro(plain)
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_one_rank_evaluates_frozen_in_hold() -> None:
    ours, plain = prepare(None)
    losses = [loss_of(m, batch(0, fsdpc.rank())) for m in (ours, plain)]
    with ours.hold():
        if fsdpc.rank() == 0:
            under(ours, torch.no_grad())
    for loss in losses:
        loss.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("native", [False, True])
def test_a_gradient_of_an_earlier_micro_step_is_stepped(native: bool) -> None:
    """Optimizers step what has a gradient, frozen since or not, as torch's do."""
    ours, plain = prepare(None)
    kind = fsdpc.torch.optim.AdamW if native else torch.optim.AdamW
    optimizers = [kind(ours.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)]
    for m in (ours, plain):
        frozen_for_the_second(m)
    average_grads(plain)
    for m, optimizer in zip((ours, plain), optimizers, strict=True):
        nn.utils.clip_grad_norm_(m.parameters(), 0.01)
        optimizer.step()
    assert_same_parameters(ours, plain)


@pytest.mark.ranks(2)
def test_parameters_that_a_forward_froze() -> None:
    """It froze what it saw; the next forward sees what the user's parameters say."""
    ours, plain = prepare(None)
    handle = ours.first.register_forward_pre_hook(lambda m, _: m.requires_grad_(False) and None)
    ours(batch(0, fsdpc.rank()))
    handle.remove()
    for m in (ours, plain):
        loss_of(m, batch(0, fsdpc.rank())).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


class Boxed(Net):
    """Its output is in an object that is not looked into, so no mark is on it."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(y=super().forward(x))


@pytest.mark.ranks([1, 2])
def test_a_backward_that_passes_the_marks_by() -> None:
    model: Any = build()
    model.__class__ = Boxed
    plain = twin(model)
    ours = shard(model, reshard_after_forward=False)
    for m in (ours, plain):
        loss = (m(batch(0, fsdpc.rank())).y ** 2).mean()
        under(m, torch.no_grad())
        loss.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


class Adapted(nn.Module):
    """A frozen layer and an adapter, which is frozen while it is switched off."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)
        self.on = True

    def switch(self, on: bool) -> None:
        self.on = on
        self.down.requires_grad_(on)
        self.up.requires_grad_(on)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return (y + self.up(self.down(x)) if self.on else y).tanh()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("how", ["plain", True, False])
def test_adapters_that_a_reference_switches_off(how: Any) -> None:
    torch.manual_seed(4)
    plain: Any = nn.Sequential(*(Adapted(6) for _ in range(3)))
    ours = twin(plain)
    for layer in ours:
        fully_shard(layer)
    fully_shard(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * step + fsdpc.rank()))

        def run(m: Any, x: torch.Tensor = x) -> torch.Tensor:
            if how == "plain":
                return m(x)
            for layer in m:
                x = checkpoint(layer, x.requires_grad_(), use_reentrant=how)
            return x

        for m, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            policy = run(m)
            for layer in m:
                layer.switch(False)
            with torch.no_grad():
                wanted = m(x)
            for layer in m:
                layer.switch(True)
            (-nn.functional.logsigmoid((policy - wanted).sum() + 0.1)).backward()
        average_grads(plain)
        assert_same_grads(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(ours, plain)
