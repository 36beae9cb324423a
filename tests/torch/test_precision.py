"""Dtypes of compute, gradients and outputs; autocast; units of several dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard, optim

from .common import (
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    shard,
    twin,
)


@pytest.mark.ranks(2)
def test_autocast() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    x = batch(0, fsdpc.rank())
    for m in (ours, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (m(x).float() ** 2).mean()
        loss.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_precision_of_compute_and_output() -> None:
    seen: dict[str, torch.dtype] = {}
    model = build()
    model.first.register_forward_pre_hook(lambda m, i: seen.update(x=i[0].dtype, w=m.weight.dtype))
    low = fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
        ),
    )
    y = low(batch(0, 0))
    assert seen == {"x": torch.bfloat16, "w": torch.bfloat16} and y.dtype is torch.float32
    y.sum().backward()
    assert low.first.weight.dtype is low.first.weight.grad.dtype is torch.float32
    half = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    fully_shard(half[1], mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    fully_shard(half)
    assert half(batch(0, 0)).dtype is torch.float16


class Lora(nn.Module):
    """A frozen bf16 base under a trainable fp32 pair."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@pytest.mark.ranks(2)
def test_mixed_dtypes_frozen_and_trainable_in_one_unit() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Lora(), nn.GELU(), Lora())
    ours = twin(plain)
    fully_shard(ours[0])
    fully_shard(ours[2])
    fully_shard(ours)
    options = {"lr": 0.1}
    optimizers = [
        optim.AdamW([p for p in ours.parameters() if p.requires_grad], **options),
        torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **options),
    ]
    for step in range(4):
        x = batch(step, fsdpc.rank())
        for m, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            if m is plain:
                average_grads(plain)
            optimizer.step()
    assert ours[0].base.weight.grad is None
    assert_same_parameters(ours, plain, rtol=1e-5, atol=1e-5)
