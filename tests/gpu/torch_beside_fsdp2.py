"""Trains one model under the torch frontend, under torch's FSDP2 and plainly; prints JSON.

On the device that argv[1] names, at a world of one. On "cuda" the frontend's steps run on a
stream that is not torch's default one, and it chooses the device by itself.
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn

import fsdpc
import fsdpc.torch

STEPS = 5
MAX_NORM = 0.5
DIM = 96


class Block(nn.Module):
    """x + gelu(linear(layer_norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def full(p: Any) -> list[float]:
    """All of a parameter."""
    value = p.full_tensor() if hasattr(p, "full_tensor") else p
    return value.detach().float().cpu().flatten().tolist()


def train(model: Any, optimizer: Any, clip: Any, device: str) -> dict[str, Any]:
    """Train; return losses, norms and parameters."""
    generator = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for _ in range(STEPS):
        x, y = (torch.randn(64, DIM, generator=generator).to(device) for _ in range(2))
        loss = ((model(x).float() - y) ** 2).mean()
        loss.backward()
        norm = clip(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    return {"losses": losses, "norms": norms, "values": sum(map(full, model.parameters()), [])}


def shard(model: Any, library: Any, dtype: torch.dtype | None) -> Any:
    """Every block a unit, and the rest one."""
    policy = library.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model:
        library.fully_shard(block, mp_policy=policy)
    return library.fully_shard(model, mp_policy=policy)


def main() -> None:
    """Train every way in both dtypes."""
    device = sys.argv[1]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                            world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(device)
    clip = nn.utils.clip_grad_norm_
    results = {"plain": train(plain := copy.deepcopy(model),
                              torch.optim.AdamW(plain.parameters(), lr=1e-2), clip, device)}
    for name, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        theirs = shard(copy.deepcopy(model), fsdp2, dtype)
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        results[f"fsdp2 {name}"] = train(theirs, optimizer, clip, device)
        stream = torch.cuda.Stream() if device == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            ours = shard(copy.deepcopy(model), fsdpc.torch, dtype)
            own = fsdpc.torch.optim.AdamW(ours.parameters(), lr=1e-2)
            results[f"ours {name}"] = train(ours, own, fsdpc.torch.clip_grad_norm_, device)
            again = shard(copy.deepcopy(model), fsdpc.torch, dtype)
            foreign = torch.optim.AdamW(again.parameters(), lr=1e-2, foreach=True)
            results[f"ours with torch's AdamW {name}"] = train(again, foreign, clip, device)
    results["device"] = fsdpc.get_default_device()
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
