"""Checkpoints that save products: the bits of a run without, and no product runs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import functional as F
from fsdpc import nn
from fsdpc.planning.memory_plan import measure_step

BATCH = (2, 96)


def model_of(kind: str) -> Any:
    fsdpc.manual_seed(0)
    config = fsdpc.models.preset("2M").with_(dropout=0.1)
    return fsdpc.models.Llama(config) if kind == "llama" else fsdpc.models.GPT2(config)


def trained(kind: str, dtype: Any, save: str | None, retain: bool = False) -> tuple[Any, ...]:
    """The loss, the gradients, the plan's peak and the run's."""
    model = model_of(kind)
    if save is not None:
        fsdpc.checkpoint_activations(model.blocks(), save=save)
    for unit in (*model.blocks(), model):
        fsdpc.fully_shard(unit, mp_policy=fsdpc.MixedPrecisionPolicy(param_dtype=dtype))
    ids = np.random.default_rng(fsdpc.rank()).integers(0, 256, BATCH)
    fsdpc.manual_seed(1)
    plan = fsdpc.memory_plan(model, batch_shape=BATCH).activation
    fsdpc.reset_peak_memory_stats()
    loss = model(ids, ids)
    if retain:
        loss.backward(retain_graph=True)
        model.zero_grad()
    loss.backward()
    peak = fsdpc.memory_stats()["activation_peak_bytes"]
    return float(loss), [p.grad.numpy().tobytes() for p in model.parameters()], plan, peak


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [None, fsdpc.bfloat16], ids=str)
def test_bits_and_bytes(kind: str, dtype: Any) -> None:
    plain, inputs, products = (trained(kind, dtype, s) for s in (None, "inputs", "products"))
    assert plain[:2] == inputs[:2] == products[:2]
    assert products[2] == products[3] and inputs[2] < products[2] < plain[2]
    assert trained(kind, dtype, "products", retain=True)[:2] == plain[:2]


def test_no_product_runs_again() -> None:
    flops = []
    for save in (None, "products", "inputs"):
        model = model_of("llama")
        if save is not None:
            fsdpc.checkpoint_activations(model.blocks(), save=save)
        flops.append(measure_step(model, BATCH, None)[1])
    assert flops[0] == flops[1] < flops[2]


def test_a_budget_takes_what_costs_nothing_first() -> None:
    model = model_of("llama")
    plain = measure_step(model, BATCH, None)[0]
    fitted = fsdpc.fit_activations(model, BATCH, 0.95 * plain)
    assert fitted.keeping == fitted.modules != () and fitted.recomputed == 0
    assert measure_step(model, BATCH, None)[0] == fitted.peak <= 0.95 * plain


def test_every_kind_of_product() -> None:
    """Vectors and batches have products too; a checkpoint inside repeats its own."""
    rng = np.random.default_rng(0)
    a, b, v = (fsdpc.tensor(rng.standard_normal(s).astype(np.float32), requires_grad=True)
               for s in ((3, 4, 5), (5, 6), (6,)))  # fmt: skip

    def fn(a: Any, b: Any, v: Any) -> Any:
        inner = F.checkpoint(lambda a: (a @ b).tanh(), a)
        return ((a @ b).sigmoid() * inner) @ v + F.scaled_dot_product_attention(
            a[:, None], a[:, None].tanh(), a[:, None]
        ).sum()

    found = []
    for save in (None, "products"):
        layer = nn.Module()
        layer.forward = fn
        if save is not None:
            fsdpc.checkpoint_activations([layer], save=save)
        for x in (a, b, v):
            x.grad = None
        layer(a, b, v).sum().backward()
        found.append([x.grad.numpy().tobytes() for x in (a, b, v)])
    assert found[0] == found[1]


def test_what_cannot_be_recomputed_is_named() -> None:
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            y = super().forward(x)
            if self.calls == 2:
                return super().forward(y)
            return y

    class Adds(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            y += 1
            return y.tanh()

    for kind, said in ((Counts, "that the forward did not compute"), (Adds, "changed in place")):
        layer = kind(4, 4)
        fsdpc.checkpoint_activations([layer], save="products")
        with pytest.raises(RuntimeError, match=said):
            layer(fsdpc.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="save='all' is not one of inputs, products"):
        fsdpc.checkpoint_activations([nn.Linear(4, 4)], save="all")
