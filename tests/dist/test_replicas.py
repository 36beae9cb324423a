"""Replicas that drift apart are named in backward, and those that train alike never are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn, optim

BACKWARDS = 130  # in which all weights are compared


def model_of(width: int, how: str) -> Any:
    fsdpc.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 4))
    mesh = None
    if how == "HYBRID_SHARD":
        mesh = fsdpc.init_device_mesh("cpu", (2, fsdpc.world_size() // 2))
    fsdpc.fully_shard(model[1], strategy=how, mesh=mesh)
    return fsdpc.fully_shard(model, strategy=how, mesh=mesh)


def backward(model: Any, step: int) -> None:
    x = np.random.default_rng(10 * step + fsdpc.rank()).standard_normal((3, 6), np.float32)
    model(fsdpc.tensor(x)).mean().backward()


@pytest.mark.ranks([2, 4])
def test_another_learning_rate_is_named_at_once() -> None:
    how = "NO_SHARD" if fsdpc.world_size() == 2 else "HYBRID_SHARD"
    model = model_of(70, how)
    last = fsdpc.rank() >= fsdpc.world_size() // 2
    optimizer = optim.AdamW(model.parameters(), lr=0.02 if last else 0.01)
    backward(model, 0)
    optimizer.step()
    with pytest.raises(fsdpc.MismatchError, match="replicas drifted apart: '.*' of unit"):
        backward(model, 1)


@pytest.mark.ranks([2, 4])
def test_one_value_that_differs_is_found_and_named() -> None:
    """Of 100,000, wherever it is; every rank is told of the same one."""
    world = fsdpc.world_size()
    model = model_of(9_000, "NO_SHARD" if world == 2 else "HYBRID_SHARD")
    for step in range(BACKWARDS):  # equal training is left alone
        backward(model, step)
        model.zero_grad()
    if fsdpc.rank() == world - 1:
        np.asarray(model[1].weight.local.numpy())[-1] += 1
    with pytest.raises(fsdpc.MismatchError, match=r"'1?\.?weight' of unit '.*1'"):
        for step in range(BACKWARDS):
            backward(model, step)
            model.zero_grad()
