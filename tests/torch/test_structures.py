"""What units take and return: containers, dataclasses, objects of any class."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard

from .common import assert_same_grads, average_grads, twin


@dataclass
class Plain:
    h: Any
    inside: Any = None


@dataclass(slots=True)
class Slots:
    h: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Any
    more: Any = 1


class Custom:
    def __init__(self, h: Any) -> None:
        self.h = [h]


class CustomSlots:
    __slots__ = ("h",)

    def __init__(self, h: Any) -> None:
        self.h = {"h": h}


def cycle(h: Any) -> Plain:
    found = Plain(h)
    found.inside = [found]
    return found


def normal(h: Any) -> Any:
    return torch.distributions.Normal(h, 1.0)


Pair = namedtuple("Pair", "h more")
WRAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dataclass": (Plain, lambda o: o.h),
    "slots": (Slots, lambda o: o.h),
    "frozen slots": (Frozen, lambda o: o.h),
    "nested": (lambda h: [Slots({"h": Plain(h)})], lambda o: o[0].h["h"].h),
    "named tuple": (lambda h: Pair(h, 1), lambda o: o.h),
    "ordered": (lambda h: OrderedDict(h=h), lambda o: o["h"]),
    "custom": (Custom, lambda o: o.h[0]),
    "custom slots": (CustomSlots, lambda o: o.h["h"]),
    "namespace": (lambda h: types.SimpleNamespace(h=h), lambda o: o.h),
    "user dict": (lambda h: UserDict(h=h), lambda o: o["h"]),
    "deque": (lambda h: deque([1, h]), lambda o: o[1]),
    "set": (lambda h: {h}, lambda o: next(iter(o))),
    "distribution": (normal, lambda o: o.mean),
}


class Squares(nn.Module):
    """Takes and returns tensors in something; its weight is read in backward."""

    def __init__(self, take: Callable[[Any], Any], give: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.take, self.give = take, give

    def forward(self, x: Any) -> Any:
        return self.give(self.linear(self.take(x)) ** 2)


class Chain(nn.Module):
    def __init__(self, wrap: Any, unwrap: Any, inputs: bool) -> None:
        super().__init__()
        self.first = Squares(lambda x: x, wrap)
        self.second = Squares(unwrap, lambda x: x)
        self.between = (lambda x: wrap(unwrap(x) * 1.0)) if inputs else lambda x: x

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(x)))


def both(model: Any, plain: Any, **options: Any) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(fsdpc.rank()))
    for m in (model, plain):
        for _ in range(2):
            m(x).sum().backward()
    average_grads(plain)
    assert_same_grads(model, plain, **options)


@pytest.mark.ranks([1, 2])
def test_backward_begins_at_tensors_in_anything() -> None:
    torch.manual_seed(0)
    for wrap, unwrap in WRAPS.values():
        for inputs in (False, True):
            plain = Chain(wrap, unwrap, inputs)
            model = twin(plain)
            fully_shard(model.first)
            fully_shard(model.second)
            fully_shard(model)
            both(model, plain)


@pytest.mark.ranks([1, 2])
def test_structures_that_hold_themselves() -> None:
    """Are looked into once, and refused where a tensor in one would have to change."""
    torch.manual_seed(0)
    plain = Chain(cycle, lambda o: o.inside[0].h, inputs=False)
    model = twin(plain)
    fully_shard(model.first)
    model.second = plain.second  # takes the cycle as it is
    x = torch.randn(3, 4)  # the same on every rank
    model(x).sum().backward()
    full = model.first.linear.weight.grad.full_tensor()
    plain(x).sum().backward()
    torch.testing.assert_close(full, plain.first.linear.weight.grad)
    fully_shard(model.second)
    with pytest.raises(TypeError, match="a Plain that holds itself, with tensors"):
        model(torch.ones(3, 4))


@pytest.mark.ranks(1)
def test_structures_are_cast_and_left_alone() -> None:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16)
    seen: list[Any] = []
    unit = fully_shard(Squares(lambda x: seen.append(x) or x.h, lambda y: y), mp_policy=policy)
    given = Frozen(torch.ones(1, 4), more=torch.ones(2, dtype=torch.int64))
    unit(given)
    assert type(seen[0]) is Frozen and seen[0].h.dtype is torch.bfloat16
    assert seen[0].more is given.more and given.h.dtype is torch.float32
    given = Frozen(torch.ones(1, 4, dtype=torch.bfloat16))
    unit(given)
    assert seen[1] is given
    around = Plain(torch.ones(1, 4, dtype=torch.bfloat16))
    around.inside = {"me": around}
    unit(around)  # no tensor changes
    assert seen[2] is around
    around.h = torch.ones(1, 4)
    with pytest.raises(TypeError, match="holds itself"):
        unit(around)


@pytest.mark.ranks([1, 2])
def test_a_cache_that_units_fill_and_return() -> None:
    """Each unit returns an object with tensors of those before it, which begin other backwards."""

    class Cache:
        def __init__(self) -> None:
            self.kept: list[Any] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any, cache: Cache) -> Any:
            y = self.linear(x) ** 2
            cache.kept.append(y * 2)
            return x + y, cache

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x: Any) -> Any:
            cache = Cache()
            for layer in self.layers:
                x, cache = layer(x, cache)
            return x + sum(cache.kept)

    torch.manual_seed(0)
    plain = Layers()
    model = twin(plain)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    both(model, plain)
    model(torch.ones(1, 4)).sum().backward()
    reduced = [act for act in fsdpc.schedule(model).acts if "reduce" in str(act)]
    assert len(reduced) == (3 if fsdpc.world_size() > 1 else 0), reduced
