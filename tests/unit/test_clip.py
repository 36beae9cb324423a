"""Clipping without ranks, against torch: norms of every kind, values, dtypes, NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc import nn

RNG = np.random.default_rng(11)
GRADIENTS = [
    (RNG.normal(size=shape) * np.exp2(RNG.integers(-8, 8, shape))).astype(np.float32)
    for shape in ((7, 5), (33,), (4, 3, 2), (1,), (0, 3))
]


def pair(
    gradients: list[np.ndarray] = GRADIENTS, dtype: str = "float32"
) -> tuple[list[nn.Parameter], list[torch.nn.Parameter]]:
    """The same parameters and gradients, ours and torch's."""
    ours, theirs = [], []
    for g in gradients:
        p = nn.Parameter(fsdpc.tensor(np.zeros(g.shape, np.float32)).to(dtype))
        p.grad = fsdpc.tensor(g).to(dtype)
        q = torch.nn.Parameter(torch.zeros(g.shape, dtype=getattr(torch, dtype)))
        q.grad = torch.tensor(g).to(getattr(torch, dtype))
        ours.append(p)
        theirs.append(q)
    return ours, theirs


def values(ours: list[nn.Parameter]) -> list[np.ndarray]:
    return [p.grad.to("float64").numpy() for p in ours]


@pytest.mark.parametrize("p", [1, 2, 3, 0.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.75, 1e6])
def test_norms_are_torchs(p: float, max_norm: float) -> None:
    ours, theirs = pair()
    norm = fsdpc.clip_grad_norm_(ours, max_norm, p)
    full = [q for q in theirs if q.numel()]  # torch has no infinity norm of nothing
    reference = torch.nn.utils.clip_grad_norm_(full, max_norm, p)
    assert float(norm) == pytest.approx(float(reference), rel=1e-5)  # torch's is in float32
    for mine, his in zip(values(ours), theirs, strict=True):
        np.testing.assert_allclose(mine, his.grad.double().numpy(), rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_norms_of_other_dtypes(dtype: str, p: float) -> None:
    ours, _ = pair(dtype=dtype)
    everything = np.concatenate([v.ravel() for v in values(ours)])
    norm = float(fsdpc.clip_grad_norm_(ours, math.inf, p))
    assert norm == pytest.approx(np.linalg.norm(everything, p), rel=1e-13)
    for name, each in fsdpc.grad_norms(ours, p).items():
        i = int(name.split()[-1])
        expected = np.linalg.norm(values(ours)[i].ravel(), p) if values(ours)[i].size else 0
        assert each == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.ranks(1)
def test_the_factor_is_as_wide_as_the_gradients(sharded: bool) -> None:
    """Two equal layers: one is clipped, its gradients are read, and its step is taken."""
    layers = [nn.Linear(5, 3, dtype=fsdpc.float64) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = fsdpc.tensor(RNG.normal(size=(4, 5)))
    for layer in layers:
        if sharded:
            fsdpc.fully_shard(layer)
        layer(x).sum().backward()
    plain = values(list(layers[0].parameters()))
    before = [p.numpy().copy() for p in layers[0].state_dict().values()]
    norm = float(fsdpc.clip_grad_norm_(layers[1], 0.7))
    fsdpc.optim.SGD(layers[1].parameters(), lr=1.0).step()
    clipped = [g * (0.7 / (norm + 1e-6)) for g in plain]
    for p, old, g in zip(layers[1].state_dict().values(), before, clipped, strict=True):
        np.testing.assert_allclose(p.numpy(), old - g, rtol=1e-14, atol=1e-15)
    for mine, g in zip(values(list(layers[1].parameters())), clipped, strict=True):
        np.testing.assert_allclose(mine, g, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("limit", [0.0, 0.1, 0.5, 6e4, math.inf])
def test_values_are_torchs(dtype: str, limit: float) -> None:
    gradients = [*GRADIENTS, np.array([np.nan, np.inf, -np.inf, 0.0, -0.1], np.float32)]
    ours, theirs = pair(gradients, dtype)
    fsdpc.clip_grad_value_(ours, limit)
    torch.nn.utils.clip_grad_value_(theirs, limit)
    for mine, his in zip(values(ours), theirs, strict=True):
        np.testing.assert_array_equal(mine, his.grad.double().numpy())
    assert math.isnan(values(ours)[-1][0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_what_is_not_finite_is_torchs(value: float, p: float) -> None:
    poisoned = [g.copy() for g in GRADIENTS]
    poisoned[2][1, 1, 1] = value
    ours, theirs = pair(poisoned)
    norm = float(fsdpc.clip_grad_norm_(ours, math.inf, p))
    reference = float(torch.nn.utils.clip_grad_norm_(theirs[:-1], math.inf, p))
    assert norm == reference or (math.isnan(norm) and math.isnan(reference))
    with pytest.raises(FloatingPointError, match="in 'number 2';"):
        fsdpc.clip_grad_norm_(ours, 1.0, p, error_if_nonfinite=True)


def test_a_norm_of_nan_makes_all_gradients_nan() -> None:
    poisoned = [g.copy() for g in GRADIENTS]
    poisoned[2][1, 1, 1] = math.nan
    ours, theirs = pair(poisoned)
    fsdpc.clip_grad_norm_(ours, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs[:-1], 1.0)
    for mine, his in zip(ours, theirs[:-1], strict=False):
        assert np.isnan(mine.grad.numpy()).all() and his.grad.isnan().all()


def test_powers_that_do_not_fit_are_told_from_gradients_that_are_not_finite() -> None:
    ours, _ = pair([np.full(3, 1e30, np.float32)])
    assert math.isinf(float(fsdpc.clip_grad_norm_(ours, math.inf, 20)))
    with pytest.raises(FloatingPointError, match="gradients are finite: powers of 20 do not fit"):
        fsdpc.clip_grad_norm_(ours, 1.0, 20, error_if_nonfinite=True)


def test_nothing_to_clip() -> None:
    layer = nn.Linear(2, 2)
    for p in (1, 2, 3, math.inf):
        assert float(fsdpc.clip_grad_norm_(layer, 1.0, p)) == 0
    fsdpc.clip_grad_value_(layer, 1.0)
    assert fsdpc.grad_norms(layer) == {}
    assert float(fsdpc.clip_grad_norm_([], 1.0)) == 0


def test_one_parameter_alone() -> None:
    ours, _ = pair()
    norm = float(fsdpc.clip_grad_norm_(ours[0], math.inf))
    assert fsdpc.grad_norms(ours[0]) == {"number 0": norm}
    fsdpc.clip_grad_value_(ours[0], 0.25)
    assert np.abs(values(ours)[0]).max() == 0.25 < np.abs(values(ours)[1]).max()
