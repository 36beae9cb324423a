"""Steps inside backward under torch: the bits of steps after it, without gradients of their own."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import fsdpc
from fsdpc.torch import clip_grad_norm_, fully_shard, optim

from .common import build, full_parameters


def made(**options: Any) -> Any:
    torch.manual_seed(3)
    model = build()
    for block in model.modules():
        if type(block).__name__ == "Block":
            fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: Any, optimizer: Any, steps: range, call_step: bool = True) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    chance = torch.Generator().manual_seed(fsdpc.rank())
    for _ in steps:
        model(torch.randn(4, 7, generator=chance)).square().sum().backward()
        if call_step:
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()


class Pick(torch.nn.ModuleList):
    """Rank 1 uses both layers, others only the first."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x)) if fsdpc.rank() == 1 else self[0](x)


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_bits_of_steps_after_backward(kind: str) -> None:
    found = []
    for inside in (False, True):
        model = made()
        optimizer = getattr(optim, kind)(model.parameters(), lr=0.05)
        if inside:
            optimizer.step_in_backward()
        train(model, optimizer, range(4), call_step=not inside)
        found.append((full_parameters(model), copy.deepcopy(optimizer.state_dict()["state"])))
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name]), name
    for i, states in found[0][1].items():
        for key, value in states.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[1][1][i][key])), key


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("end", ["leave", "drop"])
def test_gradients_come_back(end: str) -> None:
    """Memory of gradients is two units', until the optimizer leaves or goes away."""
    model, plain = made(), made()
    before = fsdpc.memory_stats()["grad_bytes"]
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    kept = [p.detach() for p in model.parameters()]
    optimizer.step_in_backward()
    one = fsdpc.memory_plan(plain).grad
    assert fsdpc.memory_stats()["grad_bytes"] - before < -0.2 * one
    train(model, optimizer, range(2))
    assert all(p.grad is None for p in model.parameters()) and kept
    with pytest.raises(NotImplementedError, match="no gradients to clip"):
        clip_grad_norm_(model.parameters(), 1.0)
    p = next(model.parameters())
    p.grad = torch.zeros_like(p)
    with pytest.raises(NotImplementedError, match="no gradients to clip, unscale or assign"):
        optimizer.step()
    p.grad = None
    with pytest.raises(NotImplementedError, match="add_param_group"):
        optimizer.add_param_group({"params": []})
    if end == "leave":
        for enabled in (False, True, False):
            optimizer.step_in_backward(enabled)
    else:
        del optimizer
        gc.collect()  # torch's schedules refer to their optimizers in circles
    for each in (model, plain):
        each(torch.ones(2, 7)).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())
    assert fsdpc.memory_stats()["grad_bytes"] == before


@pytest.mark.ranks([1, 2])
def test_what_cannot_be_is_refused() -> None:
    model = made()
    optimizer = optim.AdamW(model.parameters())
    p = next(model.parameters())
    hook = p.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(NotImplementedError, match="has hooks that wait for its gradient"):
        optimizer.step_in_backward()
    hook.remove()
    model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"has gradients: call zero_grad\(\) first"):
        optimizer.step_in_backward()
    optimizer.zero_grad()
    optimizer.step_in_backward()
    penalty = sum(q.to_local().square().sum() for q in model.parameters())
    with pytest.raises(NotImplementedError, match="no gradients to clip, unscale or assign"):
        (model(torch.ones(2, 7)).sum() + penalty).backward()


@pytest.mark.ranks(2)
def test_what_only_one_rank_uses_is_named() -> None:
    model = fully_shard(Pick())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.step_in_backward()
    with pytest.raises(RuntimeError, match="parameter '1.weight' of unit 'Pick' was used on some"):
        model(torch.ones(2, 4)).sum().backward()
