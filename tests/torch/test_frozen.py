"""Parameters that are frozen when they are sharded: no gradients or states, and torch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsdpc
from fsdpc.torch import optim

from .common import (
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    both,
    build,
    end_step,
    full_parameters,
    loss_of,
    shard,
    train_twins,
    twin,
)


def freeze(model: Any) -> None:
    """A whole unit, a part of one and a part of the root."""
    for part in (model.blocks[1], model.blocks[2].linear, model.first):
        part.requires_grad_(False)


def prepare(**options: Any) -> tuple[Any, Any]:
    """A model that is frozen before it is sharded, and its plain twin."""
    model = build()
    freeze(model)
    plain = twin(model)
    return shard(model, **options), plain


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD"]


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_and_thawing(strategy: str) -> None:
    model, plain = prepare(strategy=strategy)
    clip = {"fn": torch.nn.utils.clip_grad_norm_, "max_norm": 0.1}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    train_twins(model, plain, optimizers, 3, **clip)
    for m in (model, plain):
        m.blocks[2].requires_grad_(True)
    train_twins(model, plain, optimizers, 3, **clip)
    for m in (model, plain):
        m.requires_grad_(True)
    train_twins(model, plain, optimizers, 3, **clip)


@pytest.mark.ranks(2)
def test_bits_are_those_of_parameters_with_gradients() -> None:
    results = []
    for early in (True, False):
        model = build()
        if early:
            freeze(model)
        shard(model)
        if not early:
            freeze(model)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, fsdpc.rank()))
            with torch.no_grad():  # the backward reads what the forward read
                model.first.weight.mul_(0.5)
                model.blocks[1].linear.weight.data.add_(1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        results.append(full_parameters(model))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.ranks(2)
def test_memory_is_that_of_what_is_trained() -> None:
    held = []
    for frozen in (False, True):
        before = fsdpc.memory_stats()
        model = build(dim=64)
        if frozen:
            model.blocks.requires_grad_(False)
        shard(model)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, batch(0, fsdpc.rank())).backward()
        optimizer.step()
        after = fsdpc.memory_stats()
        kinds = "grad", "state", "reduce"
        held.append({c: after[f"{c}_bytes"] - before[f"{c}_bytes"] for c in kinds})
        del model, optimizer
    assert all(held[1][c] < held[0][c] / 4 for c in held[0]), held


@pytest.mark.ranks([1, 2])
def test_a_gradient_that_is_given_to_what_is_frozen() -> None:
    model, plain = prepare()
    both(model, plain, 0)
    end_step(model, plain)
    for m in (model, plain):
        weight = m.first.weight
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5).step()
    assert_same_parameters(model, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_frozen_parameters_of_other_dtypes_stay_whole(dtype: torch.dtype) -> None:
    model = build()
    values = torch.arange(5).add(fsdpc.rank()).to(dtype)
    model.last.codes = torch.nn.Parameter(values.clone(), requires_grad=False)
    with pytest.raises(fsdpc.MismatchError, match=r"last\.codes"):
        shard(model)
    model = build()
    model.last.codes = torch.nn.Parameter(values.clone(), requires_grad=False)
    ours = shard(model, sync_module_states=True)
    loss_of(ours, batch(0, 0)).backward()
    assert type(ours.last.codes) is torch.nn.Parameter and ours.last.weight.grad is not None
    assert torch.equal(ours.state_dict()["last.codes"].float(), torch.arange(5).float())


@pytest.mark.ranks(2)
def test_gradients_in_the_way_are_named() -> None:
    model, plain = prepare()
    both(model, plain, 0)
    model.blocks[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"linear.*holds gradients: call zero_grad\(\)"):
        model(batch(1, fsdpc.rank()))
    plain.blocks[2].requires_grad_(True)
    for m in (model, plain):
        m.zero_grad()
    both(model, plain, 1)
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_thawed_between_forward_and_backward() -> None:
    """As in plain torch: what a forward recorded counts."""
    model, plain = prepare()
    x = batch(0, fsdpc.rank())
    for m in (model, plain):
        loss = loss_of(m, x)
        m.requires_grad_(True)
        loss.backward()
    average_grads(plain)
    end_step(model, plain)
    both(model, plain, 1)
    end_step(model, plain)


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("name", ["blocks.1", "first"])
def test_what_one_rank_trains_alone_is_named(name: str) -> None:
    """One of them was frozen by all ranks before it was sharded, so it has no gradients yet."""
    model, _ = prepare()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        if step == 1 and fsdpc.rank() == 1:
            model.get_submodule(name).requires_grad_(True)
        loss = loss_of(model, batch(step, fsdpc.rank()))
        if step == 1:
            words = rf"{name}\.[a-z.]*weight\.requires_grad=True.*the same requires_grad"
            with pytest.raises(fsdpc.MismatchError, match=words):
                loss.backward()
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
