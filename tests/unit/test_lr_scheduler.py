"""Learning-rate schedules: their shape at the joints, their end, their state, their refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpc.optim.lr_scheduler import (
    LambdaLR,
    LRScheduler,
    WarmupCosine,
    WarmupDecayLR,
    WarmupLinearDecay,
    WarmupStableDecay,
    scale_lr,
    schedule_by_name,
)


def optimizer(*rates: float) -> SimpleNamespace:
    return SimpleNamespace(param_groups=[{"lr": rate} for rate in rates or (1.0,)])


def rates(schedule: LRScheduler, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(schedule.get_last_lr()[0])
        schedule.step()
    return seen


def test_cosine_by_hand() -> None:
    seen = rates(WarmupCosine(optimizer(), 2, 6, min_ratio=0.1), 9)
    expected = [0.5, 1.0, 1.0]
    expected += [0.1 + 0.9 * (1 + math.cos(math.pi * p)) / 2 for p in (0.25, 0.5, 0.75)]
    assert seen == pytest.approx([*expected, 0.1, 0.1, 0.1], rel=1e-12)


def test_cosine_restarts() -> None:
    seen = rates(WarmupCosine(optimizer(), 0, 8, cycles=2), 9)
    assert seen[:4] == seen[4:8]
    assert (seen[0], seen[4], seen[8]) == (1.0, 1.0, 0.0)


def test_cosine_begins_each_cycle_at_the_full_rate() -> None:
    seen = rates(WarmupCosine(optimizer(), 3, 3 + 3 * 49, cycles=3), 3 + 3 * 49)
    assert [seen[3 + 49 * cycle] for cycle in range(3)] == [1.0, 1.0, 1.0]


def test_stable_decay_by_hand() -> None:
    seen = rates(WarmupStableDecay(optimizer(2.0), 2, 3, 4, min_ratio=0.5), 11)
    assert seen == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_shapes_of_a_stable_decay() -> None:
    cosine = rates(WarmupStableDecay(optimizer(), 1, 1, 4, 0.2, shape="cosine"), 8)
    expected = [1.0, 1.0, *(0.2 + 0.8 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4))]
    assert cosine == pytest.approx([*expected, 0.2, 0.2], rel=1e-12)
    root = rates(WarmupStableDecay(optimizer(), 0, 0, 4, shape="sqrt"), 5)
    assert root == pytest.approx([1 - math.sqrt(t / 4) for t in range(5)], abs=1e-12)
    with pytest.raises(ValueError, match="shape must be one of linear, cosine, sqrt, got 'x'"):
        WarmupStableDecay(optimizer(), 0, 0, 4, shape="x")


def test_deepspeeds_schedule_by_hand() -> None:
    """Its iteration i is our step i + 1."""
    seen = rates(WarmupDecayLR(optimizer(7.0), 10, 0.1, 0.5, 4), 14)
    log = [0.1 + 0.4 * math.log(i + 1) / math.log(4) for i in range(4)]
    line = [0.1 + 0.4 * (10 - i) / 6 for i in range(4, 11)]
    assert seen == pytest.approx([log[0], *log, *line, 0.1, 0.1], rel=1e-12)
    linear = rates(WarmupDecayLR(optimizer(), 4, 0.0, 1.0, 2, "linear"), 6)
    assert linear == pytest.approx([0, 0, 0.5, 1, 0.5, 0], abs=1e-12)
    with pytest.raises(ValueError, match="warmup_type must be"):
        WarmupDecayLR(optimizer(), 4, warmup_type="x")
    with pytest.raises(ValueError, match="in this order"):
        WarmupDecayLR(optimizer(), 4, 0.2, 0.1)


def test_schedules_by_name() -> None:
    for name, cls, options in (
        ("cosine", WarmupCosine, {"warmup": 1, "total": 4}),
        ("linear", WarmupLinearDecay, {"warmup": 1, "total": 4}),
        ("wsd", WarmupStableDecay, {"warmup": 1, "stable": 1, "decay": 2}),
        ("WarmupDecayLR", WarmupDecayLR, {"total_num_steps": 4}),
    ):
        assert type(schedule_by_name(name, optimizer(), **options)) is cls
    options = {"warmup": 0, "stable": 0, "decay": 4}
    by_name = [rates(schedule_by_name(f"wsd{s}", optimizer(), **options), 4)[1]
               for s in ("", "-cosine", "-sqrt")]  # fmt: skip
    assert by_name == pytest.approx([0.75, (1 + math.sqrt(0.5)) / 2, 0.5])
    with pytest.raises(ValueError, match="no schedule 'x'; there are cosine, linear, wsd"):
        schedule_by_name("x", optimizer())


def test_rates_of_larger_batches() -> None:
    assert scale_lr(0.1, 2, batch=96, base_batch=12) == pytest.approx(1.6)
    assert scale_lr(0.1, rule="sqrt", batch=900, base_batch=100) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="both batch and base_batch"):
        scale_lr(0.1, batch=1)
    with pytest.raises(ValueError, match="must be above 0"):
        scale_lr(0.1, batch=1, base_batch=0)


def test_linear_decay_by_hand() -> None:
    seen = rates(WarmupLinearDecay(optimizer(), 1, 5), 7)
    assert seen == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@given(
    warmup=st.integers(0, 50),
    rest=st.integers(1, 200),
    ratio=st.floats(0, 1),
    cycles=st.integers(1, 4),
)
def test_bounds_and_the_end(warmup: int, rest: int, ratio: float, cycles: int) -> None:
    total = warmup + rest
    schedules = [
        WarmupCosine(optimizer(), warmup, total, ratio, cycles),
        WarmupLinearDecay(optimizer(), warmup, total, ratio),
    ]
    for schedule in schedules:
        seen = rates(schedule, total + 3)
        assert all(0 <= rate <= 1 + 1e-12 for rate in seen)
        assert all(rate >= ratio - 1e-12 for rate in seen[warmup:])
        assert seen[warmup] == pytest.approx(1.0)
        assert seen[total:] == [ratio] * 3


def test_each_group_keeps_its_own_rate() -> None:
    groups = optimizer(1.0, 0.1)
    schedule = LambdaLR(groups, lambda step: 1 / (1 + step))
    schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.05]
    apart = LambdaLR(optimizer(1.0, 1.0), [lambda step: 1.0, lambda step: 2.0])
    assert apart.get_last_lr() == [1.0, 2.0]


def test_initial_rates_that_are_there_are_kept() -> None:
    groups = SimpleNamespace(param_groups=[{"lr": 0.3, "initial_lr": 2.0}])
    assert LambdaLR(groups, lambda step: 1.0).get_last_lr() == [2.0]


def test_state_brings_back_step_and_rates() -> None:
    first = WarmupCosine(optimizer(3.0), 2, 10)
    rates(first, 4)
    second = WarmupCosine(optimizer(1.0), 2, 10)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert rates(second, 8) == rates(first, 8)


def test_state_of_other_groups_is_refused() -> None:
    state = WarmupCosine(optimizer(1.0), 0, 10).state_dict()
    with pytest.raises(ValueError, match="1 parameter groups, the optimizer has 2"):
        WarmupCosine(optimizer(1.0, 2.0), 0, 10).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: WarmupCosine(optimizer(), -1, 10), "warmup .* got -1"),
        (lambda: WarmupCosine(optimizer(), 10, 10), r"warmup \(10\) .* total \(10\)"),
        (lambda: WarmupCosine(optimizer(), 1, 10, 1.5), "min_ratio .* got 1.5"),
        (lambda: WarmupCosine(optimizer(), 1, 10, float("nan")), "min_ratio .* got nan"),
        (lambda: WarmupCosine(optimizer(), 1, 10, cycles=0), "cycles .* got 0"),
        (lambda: WarmupCosine(optimizer(), 1.5, 10), "warmup .* got 1.5"),
        (lambda: WarmupStableDecay(optimizer(), 1, -2, 3), "stable .* got -2"),
        (lambda: WarmupLinearDecay(optimizer(), 7, 5), r"warmup \(7\) .* total \(5\)"),
        (lambda: LambdaLR(optimizer(1.0, 2.0), [float]), "1 functions for 2"),
        (lambda: scale_lr(-0.1, 2), "lr .* got -0.1"),
        (lambda: scale_lr(0.1, 0), "ranks .* got 0"),
        (lambda: scale_lr(0.1, 2, "cubic"), "rule .* got 'cubic'"),
    ],
)
def test_arguments_out_of_range(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="int is no optimizer"):
        WarmupCosine(3, 1, 10)
    with pytest.raises(TypeError, match="param_groups"):
        WarmupCosine(SimpleNamespace(param_groups=[{}]), 1, 10)


def test_scale_lr() -> None:
    assert scale_lr(0.1, 1) == scale_lr(0.1, 1, "sqrt") == 0.1
    assert scale_lr(0.25, 16) == 4.0
    assert scale_lr(0.25, 16, "sqrt") == 1.0
