"""Frozen parameters have no gradients and no states, and training has the bits of a run that does.

The run to compare with freezes after sharding: there the same parameters are laid out with
gradients that nothing fills.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc.models import Llama

from ..offload import on_disk
from .common import CLIP, CONFIG, LR, assert_same, batch, parameters
from .test_memory_plan import CATEGORIES
from .test_offload import ALL
from .test_strategies import PRECISIONS, variants


def adapters(model: Any) -> None:
    """All but norms and one matrix: units of both kinds of parameters."""
    for name, p in model.named_parameters():
        p.requires_grad = "norm" in name or "q_proj" in name


def whole_units(model: Any) -> None:
    """Two units that have nothing to train, and a root that has little."""
    for part in (model.blocks()[0], model.blocks()[2], model.model.embed_tokens):
        part.requires_grad_(False)


def build(
    freeze: Callable[[Any], None], early: bool, param: Any, reduce: Any, **options: Any
) -> Any:
    fsdpc.manual_seed(7)
    with fsdpc.deferred_init():
        model = Llama(CONFIG)
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    if early:
        freeze(model)
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=policy, **options)
    fsdpc.fully_shard(model, mp_policy=policy, **options)
    if not early:
        freeze(model)
    return model


def train(model: Any, thaw_at: int | None = None, steps: int = 4) -> list[tuple[float, ...]]:
    """Losses and norms; micro-steps without synchronisation, then without the all-reduce."""
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=LR)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        if step == thaw_at:
            model.requires_grad_(True)
        for micro in range(2):
            setter = model.set_requires_gradient_sync if step % 2 else model.set_requires_all_reduce
            setter(micro == 1)
            loss = model(*batch(step, fsdpc.rank(), micro))
            loss.backward()
            seen.append((float(loss),))
        seen.append((float(fsdpc.clip_grad_norm_(model, CLIP)),))
        optimizer.step()
    return seen


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("precision", ["f32", "bf16-f32"])
def test_bits_are_those_of_parameters_with_gradients(precision: str) -> None:
    param, reduce = PRECISIONS[precision]
    for name, options in variants().items():
        for freeze in (adapters, whole_units):
            for thaw_at in (None, 2):
                results = []
                for early in (True, False):
                    model = build(freeze, early, param, reduce, **options)
                    results.append((train(model, thaw_at), parameters(model)))
                assert results[0][0] == results[1][0], (name, freeze, thaw_at)
                assert_same(results[0][1], results[1][1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("classes", [ALL, ("gradients",), ("masters", "optimizer")])
def test_tiers(disk: Path, classes: tuple[str, ...]) -> None:
    model = build(whole_units, True, None, None)
    expected = train(model, 2), parameters(model)
    policy = on_disk(disk, *classes, fraction=0.5)
    model = build(whole_units, True, None, None, offload_policy=policy)
    assert train(model, 2) == expected[0]
    assert_same(parameters(model), expected[1])


def adapters_have_the_same_bits() -> None:
    results = []
    for early in (True, False):
        model = build(adapters, early, None, None)
        results.append((train(model, 2), parameters(model)))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


@pytest.mark.ranks(4, hosts=2)
def test_hosts() -> None:
    adapters_have_the_same_bits()


@pytest.mark.ranks([2, 3], init=False)
def test_sums_of_deterministic_mode_grow_with_their_unit() -> None:
    fsdpc.init(deterministic=True)
    adapters_have_the_same_bits()
    fsdpc.shutdown()


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("freeze", [adapters, whole_units])
def test_memory_is_what_the_plan_says(freeze: Callable[[Any], None]) -> None:
    for name, options in variants().items():
        before = fsdpc.memory_stats()
        model = build(freeze, True, None, None, **options)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        for step in range(3):
            if step == 1:  # frozen masters have become pages of the parameter buffer
                fsdpc.reset_peak_memory_stats()
            model(*batch(step, fsdpc.rank())).backward()
            fsdpc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        after = fsdpc.memory_stats()
        mesh, strategy = options.get("mesh"), options.get("strategy")
        plan = fsdpc.memory_plan(model, mesh, strategy=strategy)
        for category in set(CATEGORIES) - {"unsharded"}:
            peak = after[f"{category}_peak_bytes"] - before[f"{category}_bytes"]
            assert peak == getattr(plan, category), (name, category)
        with fsdpc.deferred_init():
            planned = Llama(CONFIG)
        trained = fsdpc.memory_plan(planned, mesh or fsdpc.world_size(), strategy=strategy)
        assert plan.grad < trained.grad / 2 and plan.state < trained.state / 2
        del model, optimizer


@pytest.mark.ranks(2)
def test_gradients_in_the_way_are_named() -> None:
    model = build(adapters, True, None, None)
    model(*batch(0, fsdpc.rank())).backward()
    weight = model.blocks()[1].mlp.up_proj.weight
    weight.requires_grad = True
    with pytest.raises(RuntimeError, match=r"up_proj.weight.*holds gradients: call zero_grad\(\)"):
        model(*batch(1, fsdpc.rank()))
    model.zero_grad()
    model(*batch(1, fsdpc.rank())).backward()
    assert weight.grad is not None
    assert model.blocks()[0].mlp.up_proj.weight.grad is None


@pytest.mark.ranks(2)
def test_frozen_parameters_can_be_written() -> None:
    """They have masters, whose new values go out with the next epoch."""
    model = build(whole_units, True, None, None)
    before = float(model(*batch(0, fsdpc.rank())))
    fsdpc.nn.init.zeros_(model.model.embed_tokens.weight)
    assert float(model(*batch(0, fsdpc.rank()))) != before
