"""FLOP counts against published ones and our own; rates on a clock that the test sets; memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from fsdpc.models import PRESETS, preset
from fsdpc.monitor import performance
from fsdpc.monitor.performance import FORMULAS, PerformanceTracker, flops_per_token, peak_of

SMOLLM3 = SimpleNamespace(
    hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4,
    intermediate_size=11008, vocab_size=128256,
)  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_ours_is_what_the_models_count(name: str) -> None:
    config = preset(name)
    assert flops_per_token(config, 512) == config.flops_per_token(512)


def test_the_published_figure_and_what_others_count() -> None:
    found = {name: flops_per_token(SMOLLM3, 8192, name) / 1e9 for name in FORMULAS}
    assert round(found["blocks"], 2) == 24.12
    assert round(found["accelerate"], 2) == 21.86
    heads = 12 * 36 * 2048 * 8192 / 1e9
    assert found["palm"] - found["blocks"] == pytest.approx(6 * 2048 * 128256 / 1e9)
    assert found["palm"] - found["fsdpc"] == pytest.approx(heads / 2)
    assert found["blocks"] - found["kaplan"] == pytest.approx(heads)
    assert flops_per_token(preset("SmolLM3-3B"), 8192, "blocks") == found["blocks"] * 1e9
    with pytest.raises(ValueError, match="no formula 'x'; there are fsdpc, palm"):
        flops_per_token(SMOLLM3, 8192, "x")
    with pytest.raises(ValueError, match="neither 'dim' nor 'hidden_size'"):
        flops_per_token(SimpleNamespace(), 1)


def test_rates_without_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(performance.time, "perf_counter", lambda: now[0])
    tracker = PerformanceTracker(2e9, peak=4e12, warmup=2)
    for seconds in (60.0, 30.0):
        now[0] += seconds
        assert set(tracker.step(1000)) == {"memory_active", "memory_allocated", "memory_reserved"}
    for seconds in (0.5, 1.5):
        now[0] += seconds
        seen = tracker.step(1000)
    wanted = {"steps": 2, "tokens": 2000, "seconds": 2.0, "step_seconds": 1.5,
              "tokens_per_second": 1000.0, "tokens_per_second_rank": 1000.0, "tflops_rank": 2.0,
              "mfu": 0.5}  # fmt: skip
    assert {name: seen[name] for name in wanted} == wanted
    tracker.restart()
    assert "steps" not in tracker.step(1000)
    assert "mfu" not in PerformanceTracker(2e9, warmup=0).step(1)
    assert "tflops_rank" not in PerformanceTracker(warmup=0).step(1)


def test_peaks_by_name() -> None:
    assert peak_of("NVIDIA A100-SXM4-80GB") == peak_of("A100") == 312e12
    assert peak_of("NVIDIA A10") == 125e12 and peak_of("NVIDIA L4") == 121e12
    assert peak_of("NVIDIA H100 PCIe") < peak_of("NVIDIA H100 80GB HBM3")
    assert PerformanceTracker(peak="NVIDIA H200").peak == 989e12
    with pytest.raises(ValueError, match="no peak of 'Abacus' is known"):
        peak_of("Abacus")
    with pytest.raises(ValueError, match="peak must be above 0"):
        PerformanceTracker(peak=0.0)


def test_the_peak_is_measured() -> None:
    assert performance.measure_peak() > 1e8


def test_memory_of_the_engine_and_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"total_peak_bytes": 100, "cached_bytes": 20}
    monkeypatch.setattr(performance._core, "memory_stats", lambda: stats)
    theirs = {"active_bytes.all.peak": 3000, "allocated_bytes.all.peak": 2000,
              "reserved_bytes.all.peak": 4000}  # fmt: skip
    cuda = SimpleNamespace(is_initialized=lambda: False, memory_stats=lambda: theirs)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert list(performance.memory_use().values()) == [100, 100, 120]
    cuda.is_initialized = lambda: True
    assert performance.memory_use() == {
        "memory_active": 3100, "memory_allocated": 2100, "memory_reserved": 4120,
    }  # fmt: skip


@pytest.mark.ranks(2)
def test_all_ranks_and_one() -> None:
    tracker = PerformanceTracker(warmup=0)
    seen = tracker.step(10)
    assert seen["tokens_per_second"] == 2 * seen["tokens_per_second_rank"] > 0
