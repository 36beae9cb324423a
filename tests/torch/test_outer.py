"""Outer steps (DiLoCo) of sharded torch modules, against plain ones in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdpc
from fsdpc.torch import DistributedDataParallel, Outer, fully_shard, optim

from .common import batch, build, full_parameters, loss_of, shard, twin
from .test_hosts import join_again, leave, links

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Spelled:
    """DiLoCo in one process: a plain model for each replica, and one with the anchors."""

    def __init__(self, replicas: int, shards: int, every: int) -> None:
        self.models = [twin(build()) for _ in range(replicas)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in self.models]
        self.anchor = twin(build())
        self.sgd = torch.optim.SGD(self.anchor.parameters(), **NESTEROV)
        self.every, self.shards = every, shards

    def step(self, step: int) -> None:
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(i * self.shards, (i + 1) * self.shards):
                (loss_of(model, batch(step, rank)) / self.shards).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        if (step + 1) % self.every == 0:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        replicas = zip(*(model.parameters() for model in self.models), strict=True)
        held = list(zip(self.anchor.parameters(), replicas, strict=True))
        for anchor, values in held:
            anchor.grad = torch.stack([anchor - value for value in values]).mean(0)
        self.sgd.step()
        for anchor, values in held:
            for value in values:
                value.copy_(anchor)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [torch.optim.AdamW, optim.AdamW])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_as_spelled_out(mesh: tuple[int, int], make: Any) -> None:
    spelled = Spelled(*mesh, every=3)
    model = shard(build(), mesh=fsdpc.init_device_mesh("cpu", mesh))
    optimizer = make(model.parameters(), lr=1e-2)
    outer = Outer(model, every=3, **NESTEROV)
    for step in range(7):
        loss_of(model, batch(step, fsdpc.rank())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        spelled.step(step)
        plain = spelled.models[fsdpc.rank() // mesh[1]]
        for name, value in full_parameters(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_ddp() -> None:
    """Replicas' parameters and buffers are their own until the outer step."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    model = DistributedDataParallel(inner)
    outer = Outer(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss_of(model, batch(step, fsdpc.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        values = torch.cat([p.detach().reshape(-1) for p in full_parameters(model).values()])
        means = inner[1].running_mean
        assert means is not None
        for ours, equal in ((values, step % 2 == 1), (means, False)):
            every = fsdpc.all_gather(fsdpc.from_dlpack(ours.clone())).numpy().reshape(2, -1)
            assert (every[0] == every[1]).all() == equal, step


def sent(rounds: dict[str, Any] | None, steps: int) -> list[int]:
    """Bytes that this rank sends to the other host in each of some steps."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    outer = Outer(model, **rounds) if rounds else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        before = links[0].sent_bytes
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if outer:
            outer.step()
        found.append(links[0].sent_bytes - before)
    return found


@pytest.mark.ranks(4, init=False)
def test_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing travels between outer steps, and these send what a step does; with groups, parts."""
    join_again(2, tmp_path, monkeypatch)
    every_step = sent(None, 4)[-1]
    sums = 2 * 256 * 256 // 2 * 4  # a rank's rows of two matrices, in fp32
    assert sums <= every_step < 1.02 * sums + 1000
    once = sent({"every": 4}, 8)
    assert once[:3] == once[4:7] == [0, 0, 0]
    assert sums <= once[7] <= every_step and sums <= once[3] < every_step + 1000
    streamed = sent({"every": 4, "groups": 2}, 8)
    assert streamed[4] == streamed[6] == 0
    assert sums // 2 <= streamed[5] == streamed[7] <= every_step // 2 + 500
    coded = sent({"every": 4, "compression": "int8"}, 8)
    assert sums // 4 <= coded[7] < 0.26 * every_step + 500
    leave()


@pytest.mark.ranks(2)
def test_what_is_refused() -> None:
    mesh = fsdpc.init_device_mesh("cpu", (2, 1))
    model = fully_shard(nn.Linear(8, 4), mesh=mesh)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="set up outer steps before the first forward"):
        Outer(model, every=2)
    with pytest.raises(ValueError, match="2 trainable parameters are not sharded"):
        Outer(nn.Linear(2, 2), every=2)
    with pytest.raises(ValueError, match="has no replicas for outer steps"):
        Outer(fully_shard(nn.Linear(2, 2)), every=2)


@pytest.mark.ranks(2)
def test_values_that_users_write_count() -> None:
    """They are the anchors if written before, and are averaged if written between outer steps."""
    model = fully_shard(nn.Linear(8, 4, bias=False), mesh=fsdpc.init_device_mesh("cpu", (2, 1)))
    with torch.no_grad():
        model.weight.fill_(2.0)
    outer = Outer(model, every=1, lr=1.0, momentum=0.0, nesterov=False)
    with torch.no_grad():
        model.weight.fill_(4.0 + 2 * fsdpc.rank())
    outer.step()
    assert torch.equal(full_parameters(model)["weight"], torch.full((4, 8), 5.0))
    assert float(model(torch.ones(1, 8))[0, 0].detach()) == 40
