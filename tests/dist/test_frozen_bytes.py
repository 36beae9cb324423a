"""Frozen uint8 parameters: gathered as they are, by every strategy, on a disk, in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint, nn, optim

CODES = np.arange(7 * 33, dtype=np.uint8).reshape(7, 33)
BF16 = fsdpc.MixedPrecisionPolicy(param_dtype="bfloat16")


class Coded(nn.Module):
    """A layer plus a product with weights that are stored as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(fsdpc.tensor(CODES), requires_grad=False)
        self.layer = nn.Linear(33, 7)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return (y + x.to(y.dtype) @ (self.codes.to(y.dtype) / 255).T).float().sum()


def train(model: Any, steps: int = 3) -> float:
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(fsdpc.ones(2, 33)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(model(fsdpc.ones(2, 33)))


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("how", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "bf16", "disk"])
def test_losses_are_those_of_an_unsharded_model(how: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": how}
    if how == "bf16":
        options = {"mp_policy": BF16}
    elif how == "disk":
        policy = fsdpc.OffloadPolicy(masters="disk", params="disk", path=tmp_path)
        options = {"offload_policy": policy}
    before = fsdpc.memory_stats()
    fsdpc.manual_seed(0)
    model = fsdpc.fully_shard(Coded(), **options)
    found = train(model)
    assert np.array_equal(fsdpc.full_tensor(model.codes).numpy(), CODES)
    plan, after = fsdpc.memory_plan(model), fsdpc.memory_stats()
    assert after["master_bytes"] - before["master_bytes"] == plan.master
    held = float(after["unsharded_bytes"] - before["unsharded_bytes"])
    assert fsdpc.all_reduce(held, "max") == plan.unsharded
    fsdpc.manual_seed(0)
    assert abs(train(Coded()) - found) < (1 if how == "bf16" else 1e-4)
    checkpoint.save(str(tmp_path / "saved"), {"model": model})
    again = fsdpc.fully_shard(Coded(), **options | {"offload_policy": None})
    checkpoint.load(str(tmp_path / "saved"), {"model": again})
    assert float(again(fsdpc.ones(2, 33))) == found
    with pytest.raises(TypeError, match="uint8 cannot require grad"):
        model.codes.requires_grad = True


@pytest.mark.ranks(1)
def test_other_integers_are_named() -> None:
    model = Coded()
    model.codes = nn.Parameter(fsdpc.tensor(CODES.astype(np.int32)), requires_grad=False)
    with pytest.raises(TypeError, match="'codes' is int32; only floating point parameters and"):
        fsdpc.fully_shard(model)
