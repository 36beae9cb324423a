"""Torch modules that compute a tile of tokens at a time."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, tile_tokens

from .common import average_grads, join_gloo


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(20, 80), nn.Linear(80, 20)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x))) * scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(20), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x), scale=x)


def build(blocks: int = 3) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    return nn.Sequential(*[Block() for _ in range(blocks)])


def tiled(model: Any, tokens: int) -> Any:
    assert tile_tokens([block.mlp for block in model], tokens) == len(model)
    return model


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 99, 100, 1000])
def test_values_and_gradients(tokens: int, outer: bool) -> None:
    found = []
    copied = copy.deepcopy(tiled(build().double(), tokens))  # tiles its own weights
    for model in (build().double(), copied):
        torch.manual_seed(1)
        x = torch.randn(2, 5, 10, 20, dtype=torch.float64, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False) if outer else model(x)
        (y**2).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        with torch.no_grad():
            torch.testing.assert_close(model(x), y)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))


@pytest.mark.parametrize("tokens", [0, 16])
def test_wide_tensors_exist_for_one_tile(tokens: int) -> None:
    model, alive, rows = build(6), [], []

    def count(module: Any, args: Any, y: torch.Tensor) -> None:
        alive.append((weakref.ref(y), y.numel() // 80))
        rows.append(sum(n for living, n in alive if living() is not None))

    for block in model:
        block.mlp.up.register_forward_hook(count)
    if tokens:
        tiled(model, tokens)
    model(torch.randn(2, 100, 20)).sum().backward()
    assert max(rows) == (tokens or 6 * 200)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("of_unit", ["around", "itself", "inside"])
@pytest.mark.parametrize("engine", ["fsdpc", "fsdpc in bf16", "torch"])
def test_sharded(engine: str, of_unit: str, tmp_path: Path) -> None:
    """Gradients of all tiles reach the reduce buffer, tiled before or after fully_shard."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "bf16" in engine else None,
                                  reduce_dtype=torch.float32)  # fmt: skip
    shard: Any = partial(fsdpc.torch.fully_shard, mp_policy=policy)
    if engine == "torch":
        join_gloo(tmp_path)
        shard = partial(fully_shard, mesh=init_device_mesh("cpu", (2,)))
    before, after, plain = tiled(build(), 16), build(), build()
    for model in (before, after):
        for block in model:
            inside = [block.mlp.up, block.mlp.down]
            for unit in {"inside": inside, "around": [block], "itself": [block.mlp]}[of_unit]:
                shard(unit)
        shard(model)
    tiled(after, 16)
    for step in range(3):
        torch.manual_seed(10 * step + fsdpc.rank())
        x = torch.randn(2, 25, 20)
        for model in (before, after, plain):
            model.zero_grad()
            (model(x).float() ** 2).mean().backward()
        average_grads(plain)
        most = max(float(p.grad.abs().max()) for p in plain.parameters())
        near = most * (0.02 if "bf16" in engine else 1e-5)
        for p, q, r in zip(*(m.parameters() for m in (before, after, plain)), strict=True):
            for grad in (p.grad.full_tensor(), q.grad.full_tensor()):
                torch.testing.assert_close(grad, r.grad, rtol=0, atol=near)
    if engine == "torch":
        torch.distributed.destroy_process_group()


def test_dropout_and_what_is_refused() -> None:
    drop, mlp = nn.Sequential(nn.Dropout(0.5)), MLP()
    tile_tokens([drop, mlp], 13)
    x = torch.ones(2, 50, 4, requires_grad=True)
    y = drop(x)
    y.sum().backward()
    assert torch.equal(x.grad, y) and 0 < int((y == 0).sum()) < y.numel()
    for module, text in (
        (nn.MultiheadAttention(4, 2), ": MultiheadAttention mixes tokens"),
        (nn.Sequential(nn.BatchNorm1d(4)), "'0' of Sequential, a BatchNorm1d, mixes tokens"),
        (nn.LSTM(4, 4), ": LSTM mixes tokens"),
        (type("LlamaAttention", (MLP,), {})(), ": LlamaAttention mixes tokens"),
        (checkpoint_wrapper(MLP()), "CheckpointWrapper is checkpointed already"),
        (mlp, "MLP is in tiles of 13 tokens already"),
    ):
        with pytest.raises(ValueError, match=text):
            tile_tokens([module], 8)
