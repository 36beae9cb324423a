"""The loss scaler: when the scale moves, what is skipped, what is refused; without ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsdpc
from fsdpc import nn
from fsdpc.sharding.amp import LossScaler


class Counter:
    """An optimizer of one parameter that counts its steps."""

    def __init__(self) -> None:
        self.p = nn.Parameter(np.zeros(2, np.float32))
        self.param_groups = [{"params": [self.p]}]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def give(self, value: float) -> None:
        self.p.grad = fsdpc.tensor(np.array([1.0, value], np.float32))


def run(scaler: LossScaler, overflows: list[bool]) -> tuple[list[float], list[bool]]:
    """Scales after each step, and whether it was taken."""
    optimizer, scales, taken = Counter(), [], []
    for overflow in overflows:
        optimizer.give(math.inf if overflow else 1.0)
        taken.append(scaler.step(optimizer))
        scaler.update()
        scales.append(scaler.get_scale())
    assert optimizer.steps == sum(taken)
    return scales, taken


def reference(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool, smallest: float
) -> list[float]:
    """DeepSpeed's rule, by its own counters: iterations, the last overflow's, what is left."""
    scale, last, left, scales = 2.0**16, -1, hysteresis, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if left == 1:
                if scale == smallest:
                    break
                scale = max(scale / 2, smallest)
            else:
                left -= 1
            last = iteration
        else:
            if consecutive:
                left = hysteresis
            if (iteration - last) % window == 0:
                left = hysteresis
                scale *= 2
        scales.append(scale)
    return scales


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1.0, 3.0, 2.0**14]),
)
def test_the_scale_moves_as_deepspeeds(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool, smallest: float
) -> None:
    expected = reference(overflows, window, hysteresis, consecutive, smallest)
    scaler = LossScaler(16, window, hysteresis, smallest, consecutive_hysteresis=consecutive)
    scales, taken = run(scaler, overflows[: len(expected)])
    assert scales == expected
    assert taken == [not overflow for overflow in overflows[: len(expected)]]
    if len(expected) < len(overflows):
        with pytest.raises(FloatingPointError, match=f"smallest loss scale, {smallest:g}"):
            run(scaler, [True])


def test_defaults_by_hand() -> None:
    scaler = LossScaler()
    assert scaler.get_scale() == 65536
    assert run(scaler, [True, True, True, False])[0] == [65536, 32768, 16384, 16384]
    scales, _ = run(scaler, [False] * 1000)
    assert scales[997:] == [16384, 32768, 32768]  # the 1000th clean step in a row doubles it
    assert run(scaler, [True, True])[0] == [32768, 16384]  # forgiven once again


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(loss_scale=1000.0)
    scales, taken = run(scaler, [True, False, True, True, True, False])
    assert scales == [1000.0] * 6
    assert taken == [False, True, False, False, False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_counts_as_overflow(bad: float) -> None:
    scaler, optimizer = LossScaler(hysteresis=1), Counter()
    optimizer.give(bad)
    assert scaler.step(optimizer) is False
    scaler.update()
    assert scaler.get_scale() == 32768


def trained(scaler: LossScaler | None, steps: int = 3) -> list[np.ndarray]:
    fsdpc.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    x = fsdpc.tensor(np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32))
    for _ in range(steps):
        loss = (model(x) * model(x)).mean()
        if scaler is None:
            loss.backward()
            fsdpc.clip_grad_norm_(model, 0.1)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            fsdpc.clip_grad_norm_(model, 0.1)
            assert scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return [p.numpy().copy() for p in model.parameters()]


def test_a_power_of_two_changes_no_bit() -> None:
    for a, b in zip(trained(None), trained(LossScaler(10)), strict=True):
        assert (a == b).all()
    for a, b in zip(trained(None), trained(LossScaler(loss_scale=1000.0)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)  # AdamW divides gradients by their size


def test_clipping_first_clips_what_is_scaled() -> None:
    model = nn.Linear(2, 1)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    scaler = LossScaler(8)
    scaler.scale(model(fsdpc.tensor(np.ones((1, 2), np.float32))).sum()).backward()
    before = float(fsdpc.clip_grad_norm_(model, math.inf))
    scaler.unscale_(model)
    assert float(fsdpc.clip_grad_norm_(model, math.inf)) * 256 == before
    assert scaler.step(optimizer)  # the optimizer's gradients were unscaled through the model
    assert float(fsdpc.clip_grad_norm_(model, math.inf)) * 256 == before  # and not once more


def test_two_optimizers_between_updates() -> None:
    """Each is skipped for its own gradients, and one overflow is enough for the scale."""
    scaler, a, b = LossScaler(hysteresis=1), Counter(), Counter()
    a.give(math.nan)
    b.give(1.0)
    assert not scaler.step(a)
    assert scaler.step(b)
    scaler.update()
    assert (a.steps, b.steps, scaler.get_scale()) == (0, 1, 32768)


def test_calls_out_of_order() -> None:
    scaler, optimizer = LossScaler(), Counter()
    with pytest.raises(RuntimeError, match="without a step"):
        scaler.update()
    optimizer.give(65536.0)
    scaler.unscale_(optimizer)
    assert optimizer.p.grad.numpy().tolist() == [1 / 65536, 1.0]
    with pytest.raises(RuntimeError, match="Counter were unscaled since the last update"):
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) was called since"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="unscaled since"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="without a step"):
        scaler.update()
    optimizer.give(1.0)
    assert scaler.step(optimizer)


def test_state_round_trip() -> None:
    begun = [True, False, False, True, False]
    rest = [True, True, False, False, False, True, True]
    whole = LossScaler(loss_scale_window=3)
    run(whole, begun)
    again = LossScaler(initial_scale_power=3, loss_scale_window=3)
    again.load_state_dict(whole.state_dict())
    assert again.state_dict() == whole.state_dict()
    assert run(again, rest) == run(whole, rest)
    static = LossScaler(loss_scale=8.0)
    static.load_state_dict(LossScaler(loss_scale=16.0).state_dict())
    assert static.get_scale() == 16


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scale": 0.0}, ValueError, "scale must be above 0"),
        ({"scale": math.nan}, ValueError, "scale must be above 0"),
        ({"good_steps": -1}, ValueError, "good_steps must be at least 0, got -1"),
        ({"good_steps": 1.5}, TypeError, "good_steps must be an int, got 1.5"),
        ({"forgiving": 0}, ValueError, "forgiving must be at least 1"),
        ({"dynamic": False}, ValueError, "dynamic=False"),
        ({"more": 1}, KeyError, "a scaler's state has"),
    ],
)
def test_bad_states(change: dict[str, Any], error: type[Exception], text: str) -> None:
    scaler = LossScaler()
    before = scaler.state_dict()
    with pytest.raises(error, match=text):
        scaler.load_state_dict({**before, **change})
    with pytest.raises(KeyError, match="got \\[\\]"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"initial_scale_power": 200}, r"initial_scale_power must be in \[-126, 126\], got 200"),
        ({"loss_scale_window": 0}, "loss_scale_window must be at least 1, got 0"),
        ({"hysteresis": 0}, "hysteresis must be at least 1, got 0"),
        ({"min_loss_scale": 0.0}, "min_loss_scale must be above 0 and finite, got 0.0"),
        ({"min_loss_scale": math.nan}, "min_loss_scale must be above 0 and finite, got nan"),
        ({"initial_scale_power": 1, "min_loss_scale": 4}, "begins at 2, below min_loss_scale 4"),
        ({"loss_scale": -1.0}, "loss_scale must be 0"),
        ({"loss_scale": math.inf}, "loss_scale must be 0"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossScaler(**options)


def test_bad_arguments() -> None:
    scaler = LossScaler()
    with pytest.raises(TypeError, match="hysteresis must be an int, got 1.0"):
        LossScaler(hysteresis=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale takes the loss as a Tensor, got float"):
        scaler.scale(1.0)  # type: ignore[arg-type]
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(TypeError, match="give an optimizer or a Module, got SimpleNamespace"):
            call(SimpleNamespace())
