"""Recomputation that is chosen by the memory of a step."""

from __future__ import annotations

import numpy as np
import pytest

import fsdpc
from fsdpc import nn
from fsdpc.models import GPT2, Llama, preset
from fsdpc.planning.memory_plan import measure_step

BATCH = (4, 64)


def model(kind: type = Llama, **shape: int) -> fsdpc.nn.Module:
    fsdpc.manual_seed(3)
    return kind(preset("2M").with_(**shape))


def train(m: fsdpc.nn.Module) -> list[bytes]:
    ids = np.arange(4 * 64).reshape(BATCH) % 61
    m(fsdpc.tensor(ids), fsdpc.tensor(ids)).backward()
    return [p.grad.numpy().tobytes() for p in m.parameters()]


@pytest.mark.parametrize("kind", [Llama, GPT2])
@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.75, 0.6, 0.5, 0.42])
def test_the_plan_and_the_run_fit(ratio: float, kind: type) -> None:
    m = model(kind)
    peak, _ = measure_step(m, BATCH, None)
    fitted = fsdpc.fit_activations(m, BATCH, ratio * peak)
    assert fitted.peak <= ratio * peak
    assert fsdpc.memory_plan(m, 1, BATCH).activation == fitted.peak
    fsdpc.reset_peak_memory_stats()
    before = fsdpc.memory_stats()["activation_bytes"]
    grads = train(m)
    ran = fsdpc.memory_stats()["activation_peak_bytes"] - before
    assert ran <= fitted.peak + sum(p.numel() * 4 for p in m.parameters())  # gradients of leaves
    assert grads == train(model(kind))
    assert (fitted.modules == ()) == (ratio == 1)
    assert (fitted.recomputed == 0) == (fitted.modules == fitted.keeping)
    recomputing = {name for name, each in m.named_modules() if "forward" in each.__dict__}
    assert recomputing == set(fitted.modules)


def test_it_costs_no_more_than_every_nth_block() -> None:
    """With as little memory as every second block and a half of the blocks leave."""
    for which in (2, 0.5, 0.25):
        m = model(layers=8)
        plain = measure_step(m, BATCH, None)[1]
        fsdpc.checkpoint_activations(m.blocks(), which)
        peak, flops = measure_step(m, BATCH, None)
        fitted = fsdpc.fit_activations(model(layers=8), BATCH, peak)
        assert 0 <= fitted.recomputed <= flops / plain - 1


def test_costs_are_those_of_products() -> None:
    """All blocks recomputed: their forward, a third of a step without its head."""
    m = model()
    plain = measure_step(m, BATCH, None)[1]
    fsdpc.checkpoint_activations(m.blocks())
    peak, flops = measure_step(m, BATCH, None)
    fitted = fsdpc.fit_activations(model(), BATCH, peak)
    assert fitted.recomputed <= flops / plain - 1 < 1 / 3
    assert str(fitted).endswith(f"{100 * fitted.recomputed:.1f} % more FLOPs")


def test_large_models_take_no_memory() -> None:
    with fsdpc.deferred_init():
        m = Llama(preset("1B"))
    peak, _ = measure_step(m, (1, 2048), None)
    fitted = fsdpc.fit_activations(m, (1, 2048), peak // 3)
    assert fitted.peak <= peak // 3 and fitted.recomputed < 0.3
    assert all(p.is_deferred for p in m.parameters())


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no blocks\(\)"):
        fsdpc.fit_activations(nn.Linear(2, 2), (1, 2), 1)
    m = model()
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes .* 1,000 bytes are given"):
        fsdpc.fit_activations(m, BATCH, 1000)
    assert not any("forward" in each.__dict__ for each in m.modules())
    fsdpc.checkpoint_activations(m.blocks()[1:2])
    with pytest.raises(ValueError, match="layers.1' recomputes already"):
        fsdpc.fit_activations(m, BATCH, 1 << 30)
