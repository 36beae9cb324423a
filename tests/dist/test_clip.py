"""Norms over ranks: NumPy's in float64, the same bits at every world size, NaN and infinity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn
from tests.events import event_counts

POWERS = [1, 2, 3, 2.5, math.inf]
SHAPES = {"odd": (13, 37), "even": (29, 128), "vector": (777,), "conv": (9, 5, 3), "short": (2, 3)}


def constant(name: str) -> np.ndarray:
    """Eleven bits and an exponent: the mean of equal gradients over ranks is exact."""
    rng = np.random.default_rng(list(name.encode()))
    whole = rng.integers(-1023, 1024, SHAPES[name]).astype(np.float32)
    return whole * np.exp2(rng.integers(-12, 8, SHAPES[name])).astype(np.float32)


class Part(nn.Module):
    """Its parameters' gradients are the constants of their names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(np.zeros(SHAPES[name], np.float32)))

    def forward(self) -> fsdpc.Tensor:
        named = self._parameters.items()
        return sum((p * fsdpc.tensor(constant(n))).sum() for n, p in named)


class Net(nn.Module):
    """Two parts, a parameter under two names, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part("odd", "conv", "short"), Part("even")
        self.vector = nn.Parameter(np.zeros(SHAPES["vector"], np.float32))
        self.tied = self.vector
        self.frozen = nn.Parameter(np.ones(5, np.float32), requires_grad=False)

    def forward(self) -> fsdpc.Tensor:
        half = fsdpc.tensor(constant("vector") / 2)
        own = (self.vector * half).sum() + (self.tied * half).sum() + self.frozen.sum()
        return self.a() + self.b() + own


def built(sharded: bool) -> Net:
    model = Net()
    if sharded:
        for part in (model.a, model.b, model):
            fsdpc.fully_shard(part)
    model().backward()
    return model


def poison(p: Any, value: float) -> None:
    """Write into an element of the gradient on the last rank that has any of it."""
    if fsdpc.all_gather(p.grad.numel()).nonzero()[0].max() == fsdpc.rank():
        p.grad.numpy().reshape(-1)[-1] = value


NAMES = {"a.odd", "a.conv", "a.short", "b.even", "vector"}


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.ranks([1, 2, 3, 4])
def test_norms(p: float) -> None:
    model, twin = built(sharded=True), built(sharded=False)
    each = {n: np.abs(constant(n.split(".")[-1]).astype(np.float64)) for n in NAMES}
    norms = fsdpc.grad_norms(model, p)
    assert norms == fsdpc.grad_norms(twin, p)  # the bits of one process
    assert norms.keys() == each.keys()  # tied once, frozen not
    for name, values in each.items():
        assert norms[name] == pytest.approx(np.linalg.norm(values.ravel(), p), rel=1e-14)
    norm = fsdpc.clip_grad_norm_(model, math.inf, p)
    assert (norm.ndim, norm.dtype) == (0, fsdpc.float64)
    assert float(norm) == float(fsdpc.clip_grad_norm_(twin, math.inf, p))
    everything = np.concatenate([values.ravel() for values in each.values()])
    assert float(norm) == pytest.approx(np.linalg.norm(everything, p), rel=1e-14)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.ranks([2])
def test_clipping_scales_by_the_norm(p: float) -> None:
    model = built(sharded=True)
    norm = float(fsdpc.clip_grad_norm_(model, 0.5, p))
    assert norm > 1
    for name, q in model.named_parameters():
        if name in NAMES:
            expected = constant(name.split(".")[-1]) * np.float32(0.5 / (norm + 1e-6))
            assert (fsdpc.full_grad(q).numpy() == expected).all(), name
    assert float(fsdpc.clip_grad_norm_(model, math.inf, p)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.ranks([1, 3])
def test_what_is_not_finite(p: float, value: float) -> None:
    """One element of one rank: every rank has the same norm, and names the same parameter."""
    model = built(sharded=True)
    poison(model.a.short, value)
    norms = fsdpc.grad_norms(model, p)
    kind = math.isnan if math.isnan(value) else math.isinf
    assert [n for n, norm in norms.items() if not math.isfinite(norm)] == ["a.short"]
    assert kind(norms["a.short"]) and not norms["a.short"] < 0
    with pytest.raises(FloatingPointError, match=r"norm is (nan|inf): .* in 'a.short';"):
        fsdpc.clip_grad_norm_(model, 1.0, p, error_if_nonfinite=True)
    assert kind(float(fsdpc.clip_grad_norm_(model, math.inf, p)))


@pytest.mark.ranks([2])
def test_one_collective_each() -> None:
    model = built(sharded=True)
    for call in (
        lambda: fsdpc.clip_grad_norm_(model, 1.0),
        lambda: fsdpc.clip_grad_norm_(model, 1.0, math.inf),
        lambda: fsdpc.grad_norms(model),
        lambda: fsdpc.grad_norms(model, 3),
    ):
        _core.trace_reset()
        call()
        assert event_counts()["collective"] == 1
    _core.trace_reset()
    fsdpc.clip_grad_value_(model, 1.0)
    assert event_counts()["collective"] == 0


@pytest.mark.ranks([1, 2, 3])
def test_parameters_given_one_by_one() -> None:
    """Once each, however often they are named; whole units, as the manual says."""
    model = built(sharded=True)
    norm = float(fsdpc.clip_grad_norm_(model, math.inf))
    params = list(model.parameters())
    assert float(fsdpc.clip_grad_norm_(params + params, math.inf)) == norm
    part = float(fsdpc.clip_grad_norm_([model.b.even], math.inf))
    assert part == fsdpc.grad_norms(model)["b.even"]
    assert fsdpc.grad_norms([model.b.even, model.a.odd]).keys() == {"even", "odd"}


@pytest.mark.ranks([1, 2, 3])
def test_values_are_cut_off() -> None:
    """After the scale that clipping left; NaN stays."""
    model = built(sharded=True)
    norm = float(fsdpc.clip_grad_norm_(model, 100.0))
    poison(model.a.short, math.nan)
    fsdpc.clip_grad_value_(model, 0.125)
    for name, p in model.named_parameters():
        if name not in NAMES:
            continue
        scaled = constant(name.split(".")[-1]) * np.float32(100 / (norm + 1e-6))
        got, expected = fsdpc.full_grad(p).numpy(), np.clip(scaled, -0.125, 0.125)
        if name == "a.short":
            assert np.isnan(got.ravel()[-1])
            got, expected = got.ravel()[:-1], expected.ravel()[:-1]
        assert (got == expected).all(), name
        assert (np.abs(scaled) > 0.125).any() or name == "a.short"


@pytest.mark.ranks([2])
def test_ignored_gradients_are_left_alone() -> None:
    model = Net()
    fsdpc.fully_shard(model.a)
    fsdpc.fully_shard(model, ignored_params=[model.b.even])
    model().backward()
    norm = float(fsdpc.clip_grad_norm_(model, math.inf))
    assert "b.even" not in fsdpc.grad_norms(model)
    before = model.b.even.grad.numpy().copy()
    model.b.even.grad.numpy()[...] = math.nan
    assert float(fsdpc.clip_grad_norm_(model, math.inf)) == norm
    model.b.even.grad.numpy()[...] = before
    fsdpc.clip_grad_value_(model, 0.0)
    assert (model.b.even.grad.numpy() == before).all()
    assert fsdpc.grad_norms(model, math.inf)["a.odd"] == 0
