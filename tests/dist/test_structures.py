"""What native units take and return: containers, dataclasses, objects of any class."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import fsdpc
from fsdpc import nn

WIDTH = 6


class Wrapped(nn.Module):
    """Returns a square in what ``wrap`` makes of it."""

    def __init__(self, wrap: Callable[[Any], Any], take: Any = lambda x: x) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.wrap, self.take = wrap, take

    def forward(self, x: Any) -> Any:
        y = self.inner(self.take(x))
        return self.wrap(y * y)


@dataclass(slots=True)
class Kept:
    h: Any
    more: Any = 1


class Opaque:
    def __init__(self, h: Any) -> None:
        self.h = h


Pair = namedtuple("Pair", "h more")


def cycle(x: Any) -> list[Any]:
    found = [x]
    found.append(found)
    return found


@pytest.mark.ranks([1, 2])
def test_structures_are_searched_and_rebuilt() -> None:
    """In what units take and return: named tuples, subclasses and dataclasses too."""
    for wrap, first in (
        (Kept, lambda o: o.h),
        (lambda y: Kept({"a": [y]}), lambda o: o.h["a"][0]),
        (lambda y: Pair(y, 1), lambda o: o.h),
        (lambda y: OrderedDict(h=y), lambda o: o["h"]),
    ):
        seen: list[Any] = []
        policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16)
        below = fsdpc.fully_shard(Wrapped(wrap))
        above = Wrapped(lambda y: y, take=lambda o, n=seen, first=first: n.append(o) or first(o))
        fsdpc.fully_shard(above, mp_policy=policy)
        x = below(fsdpc.ones(2, WIDTH))
        above(x).sum().backward()  # marks in x begin the one backward and end the other
        assert type(seen[0]) is type(x) and first(seen[0]).dtype == fsdpc.bfloat16
        assert first(x).dtype == fsdpc.float32
        assert below.inner.weight.grad is not None and above.inner.weight.grad is not None
        given = wrap(fsdpc.ones(2, WIDTH, dtype=fsdpc.bfloat16))
        above(given)
        assert seen[1] is given  # nothing changed


@pytest.mark.ranks([1, 2])
def test_an_output_that_hides_its_tensors_is_refused() -> None:
    """Nothing in it would tell that backward begins."""
    x = fsdpc.ones(2, WIDTH)
    for wrap, message in (
        (Opaque, r"unit 'Wrapped' returned a Opaque that holds a tensor which .* grad, at \.h"),
        (lambda y: [1, {"a": Kept(Opaque([y]))}], r"returned a Opaque .* at \.h\[0\]"),
        (lambda y: deque([y]), r"returned a deque .* at \[0\]"),
        (lambda y: UserDict(h=y), r"returned a UserDict .* at \.data\['h'\]"),
    ):
        model = fsdpc.fully_shard(Wrapped(wrap))
        with pytest.raises(TypeError, match=message):
            model(x)
        with fsdpc.no_grad():
            model(x)
        model.wrap = lambda y: ([y], Opaque(y.detach()), "text", None, 1)
        model(x)[0][0].sum().backward()
        assert model.inner.weight.grad is not None
    model = fsdpc.fully_shard(Wrapped(cycle))
    with pytest.raises(TypeError, match="a list that holds itself, with tensors"):
        model(x)
