"""FSDP over a flattened mesh ("dp", "cp"): ranks of "cp" share sequences.

torch 2.13's ``context_parallel`` does not run on CPUs: "Operator
aten._scaled_dot_product_flash_attention_for_cpu does not have a sharding strategy". An all-to-all
attention, in which each rank has all positions of some heads (Ulysses), needs only functional
collectives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from fsdpc.torch import fully_shard

from .common import full, join_gloo

DIM, HEADS, SEQUENCE, ROWS, STEPS = 16, 4, 8, 2, 5


def exchange(x: torch.Tensor, group: Any, gathers_heads: bool) -> torch.Tensor:
    """Turn (rows, positions, heads, dim) of own positions into one of own heads, or back."""
    n = group.size()
    cut, joined = (1, 2) if gathers_heads else (2, 1)
    parts = all_to_all_single_autograd(torch.stack(x.chunk(n, cut)), None, None, group)
    return torch.cat(list(parts), joined)


class Attention(nn.Module):
    """Causal attention over a sequence of which each rank of a group has consecutive positions."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)  # AdamW would magnify the noise of k's bias
        self.out = nn.Linear(DIM, DIM)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if self.group is not None:
            q, k, v = (exchange(t, self.group, False) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.group is not None:
            y = exchange(y, self.group, True)
        return x + self.out(y.flatten(2))


def build(group: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), Attention(group), Attention(group))


def data(step: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dp)
    x, y = torch.randn(2, ROWS, SEQUENCE, DIM, generator=generator)
    return x, y


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("backend", ["gloo", "fsdpc"])
def test_sequences_over_a_flattened_mesh(backend: str, tmp_path: Any) -> None:
    join_gloo(tmp_path, backend)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    ours, plain = build(mesh["cp"].get_group()), build()
    for layer in ours:
        fully_shard(layer, mesh=mesh["dp_cp"])
    ours = fully_shard(ours, mesh=flat)
    assert ours[1].out.weight.device_mesh == flat and ours[1].out.weight.placements[0].is_shard(0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, plain)]
    dp, cp = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = (t.chunk(2, 1)[cp] for t in data(step, dp))
        loss = nn.functional.mse_loss(ours(x), y)
        loss.backward()
        dist.all_reduce(mean := loss.detach().clone())
        both = [nn.functional.mse_loss(plain(x), y) for x, y in (data(step, 0), data(step, 1))]
        (sum(both) / 2).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(mean / 4, (sum(both) / 2).detach(), rtol=1e-6, atol=0)  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    for what in ("grad", "data"):
        mine, its = (
            torch.cat([full(getattr(p, what)).flatten().double() for p in m.parameters()])
            for m in (ours, plain)
        )
        assert (mine - its).norm() <= 1e-6 * its.norm(), what
    dist.destroy_process_group()
