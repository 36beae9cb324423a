"""Published sums of memory, traffic and money, and where they differ from what is held."""

from __future__ import annotations

from typing import Any

import pytest

import fsdpc
from fsdpc import estimate_activations, training_cost

SHAPE = {"batch": 4, "seq": 2048, "dim": 4096, "layers": 32}


def of_7b(strategy: str, world: int = 8, **options: Any) -> Any:
    return fsdpc.estimate(params=7e9, world=world, strategy=strategy, dtype="bfloat16", **options)


def test_a_step_of_7b_in_bf16() -> None:
    whole, shared = of_7b("NO_SHARD"), of_7b("FULL_SHARD")
    assert [round(n / 1e9) for n in whole.parts.values()] == [14, 14, 56]
    assert whole.parts["params"] + whole.parts["grads"] + whole.parts["states"] == 84e9
    assert shared.published == 84e9 / 8
    kept = estimate_activations(**SHAPE)
    assert round(kept / 1e9, 1) == 21.5
    assert round((whole.published + kept) / 1e9, 1) == 105.5
    assert round(shared.sent / 1e9) == 37
    assert shared.seconds(50e9) == pytest.approx(36.75 / 50)
    with pytest.raises(ValueError, match="bandwidth must be above 0"):
        shared.seconds(0)


def test_mixed_precision_is_what_is_held() -> None:
    """Without sharding, beside reduce buffers: these are the engine's own."""
    whole = of_7b("NO_SHARD", device="cpu")
    assert whole.mixed == 126e9
    assert whole.held_total - whole.held["reduce"] == pytest.approx(126e9)
    assert of_7b("FULL_SHARD").mixed == pytest.approx(126e9 / 8)
    optim = of_7b("SHARD_OPTIM").mixed
    assert optim == pytest.approx(14e9 + 28e9 + (28e9 + 56e9) / 8)
    gpu = of_7b("FULL_SHARD", device="cuda", units=33)
    few = gpu.held_total - gpu.held["reduce"] - gpu.mixed  # units that are whole at a time
    assert 0 < few < 4 * 14e9 / 33


def test_activations_by_both_rules() -> None:
    rule = estimate_activations(**SHAPE)
    assert estimate_activations(**SHAPE, dtype="float32") == 2 * rule
    paper = estimate_activations(**SHAPE, heads=32)
    assert paper == 2048 * 4 * 4096 * (34 + 5 * 32 * 2048 / 4096) * 32
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        estimate_activations(batch=1, seq=1, dim=1, layers=0)


def test_hours_and_money() -> None:
    found = training_cost(tokens=3.6e12, flops_per_token=1e9, ranks=10, flops=1e14, price=2.5)
    assert (found.rank_hours, found.hours, found.cost) == (10_000, 1000, 25_000)
    assert "1,000.0 hours, 10,000 of all ranks together, 25,000" in str(found)
    with pytest.raises(ValueError, match="price -1 at least 0"):
        training_cost(tokens=1, flops_per_token=1, ranks=1, flops=1, price=-1)
