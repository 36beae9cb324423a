"""Units of one model on different meshes: each half of the ranks has an expert of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn
from fsdpc.sharding.amp import LossScaler

DIM = 6


class Net(nn.Module):
    """A linear layer, an expert by the rank's half, and a linear layer."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(experts)])
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: Any, which: int) -> Any:
        x = self.experts[which](self.first(x).tanh()).tanh()
        return (self.last(x) * self.last(x)).mean()


def build() -> tuple[Net, Any, Any]:
    """The plain model with two experts, the sharded one with this half's, and its mesh."""
    mesh = fsdpc.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    fsdpc.manual_seed(1)
    plain, ours = Net(2), Net(1)
    half = mesh.get_local_rank("ep")
    for name, p in ours.named_parameters():
        source = name.replace("experts.0", f"experts.{half}")
        with fsdpc.no_grad():
            p.copy_(dict(plain.named_parameters())[source])
    fsdpc.fully_shard(ours.experts[0], mesh=mesh["efsdp"])
    fsdpc.fully_shard(ours.first)
    fsdpc.fully_shard(ours)
    ours.experts[0].set_gradient_divide_factor(4)
    return plain, ours, mesh


def inputs(step: int, rank: int) -> Any:
    values = np.random.default_rng([step, rank]).normal(size=(5, DIM))
    return fsdpc.tensor(values.astype(np.float32))


@pytest.mark.ranks(4)
def test_experts_equal_the_unsharded_model() -> None:
    plain, ours, mesh = build()
    half = mesh.get_local_rank("ep")
    optimizers = [fsdpc.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
    for step in range(5):
        ours(inputs(step, fsdpc.rank()), 0).backward()
        for rank in range(4):
            (plain(inputs(step, rank), rank // 2) * 0.25).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = dict(plain.named_parameters())
    for name, p in ours.named_parameters():
        expected = values[name.replace("experts.0", f"experts.{half}")].numpy()
        np.testing.assert_allclose(fsdpc.full_tensor(p).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(4)
def test_what_different_ranks_share_is_refused(tmp_path: Path) -> None:
    _, ours, mesh = build()
    ours(inputs(0, fsdpc.rank()), 0).backward()
    with pytest.raises(NotImplementedError, match="units on meshes of different ranks: call this"):
        fsdpc.clip_grad_norm_(ours, 1.0)
    with pytest.raises(NotImplementedError, match="'experts.0', which 2 of all ranks share"):
        fsdpc.checkpoint.save(tmp_path, {"model": ours})
    with pytest.raises(NotImplementedError, match=r"different shapes \[\(1, 2\), \(1, 4\)\]"):
        fsdpc.memory_plan(ours)
    assert fsdpc.sharding_layout(ours, 4).units
    expert = list(ours.experts[0].parameters())
    rest = [*ours.first.parameters(), *ours.last.parameters()]
    norms = [float(fsdpc.clip_grad_norm_(each, float("inf"))) for each in (expert, rest)]
    of_experts = fsdpc.tensor([norms[0] ** 2])
    mesh.comm("ep").all_reduce(of_experts, "sum")
    total = (float(of_experts) + norms[1] ** 2) ** 0.5
    for each, norm in zip((expert, rest), norms, strict=True):
        fsdpc.clip_grad_norm_(each, 0.01 * norm / total)
    found = fsdpc.grad_norms(ours)
    assert sum(x * x for x in found.values()) < 0.01**2
    totals = fsdpc.all_gather(fsdpc.tensor([total])).numpy()
    assert (totals == totals.ravel()[0]).all()


@pytest.mark.ranks(4)
def test_an_overflow_of_one_expert_skips_every_step() -> None:
    _, ours, mesh = build()
    optimizer = fsdpc.optim.SGD(ours.parameters(), lr=0.1)
    scaler = LossScaler(initial_scale_power=2)
    scaler.scale(ours(inputs(0, fsdpc.rank()), 0)).backward()
    if mesh.get_local_rank("ep") == 1:
        ours.experts[0].weight.grad.fill_(float("inf"))
    assert scaler.step(optimizer) is False
