"""Arrays of torch modules on a disk have the bits of memory, and torch reads and writes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdpc
from fsdpc.torch import (
    MixedPrecisionPolicy,
    fully_shard,
    get_optimizer_state_dict,
    optim,
    set_optimizer_state_dict,
)
from tests.offload import on_disk

from .common import batch, build, full, full_parameters, join_gloo, loss_of, shard

WIDE = {"dim": 96, "blocks": 2}
ALL = ("params", "gradients", "masters", "optimizer")
PLACES: list[tuple[tuple[str, ...], float]] = [
    (("masters", "optimizer"), 1.0),
    (("optimizer",), 0.4),
    (("masters",), 0.4),
    (("gradients",), 1.0),
    (ALL, 0.4),
]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def wide(policy: Any, seed: int = 3, **options: Any) -> Any:
    return shard(build(seed, **WIDE), offload_policy=policy, **options)


def step(model: Any, optimizer: Any, number: int) -> list[float]:
    """Two micro-steps, clipped."""
    losses = []
    for micro in range(2):
        loss = loss_of(model, batch(number, fsdpc.rank(), micro))
        loss.backward()
        losses.append(float(loss.detach()))
    losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    optimizer.step()
    optimizer.zero_grad()
    return losses


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole values and states."""
    found: dict[str, Any] = {n: v.numpy().tobytes() for n, v in full_parameters(model).items()}
    for number, state in optimizer.state_dict()["state"].items():
        found.update({f"{number} {key}": full(v).numpy().tobytes() for key, v in state.items()})
    return found


def train(policy: Any, kind: str, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Steps, between which weights are read and written."""
    model = wide(policy, **options)
    make, hypers = OPTIMIZERS[kind]
    optimizer = make(model.parameters(), lr=1e-2, **hypers)
    losses = step(model, optimizer, 0)
    average = [p.detach().clone() for p in model.parameters()]
    for number in range(1, 5):
        losses += step(model, optimizer, number)
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)  # reads what the step has just written
            if number == 2:
                for mean, p in zip(average, model.parameters(), strict=True):
                    p.copy_(mean)
            if number == 3:
                model.blocks[1].linear.weight.data.mul_(0.5)
    found = everything(model, optimizer)
    found.update({f"average {i}": full(mean).numpy().tobytes() for i, mean in enumerate(average)})
    return losses, found


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_bits_are_those_of_memory(kind: str, disk: Path) -> None:
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    options: dict[str, Any] = half if kind == "SGD" else {}
    expected = train(None, kind, **options)
    for i, (classes, fraction) in enumerate(PLACES):
        policy = on_disk(disk, *classes, fraction=fraction)
        where = {"reshard_after_forward": i % 2 == 0, **options}
        assert train(policy, kind, **where) == expected, classes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_name", [False, True])
def test_states_go_over(by_name: bool, disk: Path) -> None:
    """From memory to the disk and back, over states that are there and over none."""
    policies = [
        None,
        on_disk(disk, "masters", "optimizer"),
        on_disk(disk, "optimizer", fraction=0.4),
    ]
    saved: list[Any] = []
    for policy in policies:
        model = wide(policy)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            step(model, optimizer, number)
        saved.append((
            {k: v.clone() for k, v in model.state_dict().items()},
            get_optimizer_state_dict(model, optimizer) if by_name
            else copy.deepcopy(optimizer.state_dict()),
        ))  # fmt: skip
        step(model, optimizer, 2)
        expected = everything(model, optimizer)
    for i, policy in enumerate(policies):
        weights, states = saved[i - 1]
        model = wide(policy, seed=9)
        optimizer = optim.AdamW(model.parameters(), lr=1.0)
        if i:
            step(model, optimizer, 7)
        model.load_state_dict(weights)
        if by_name:
            set_optimizer_state_dict(model, optimizer, states)
        else:
            optimizer.load_state_dict(states)
        step(model, optimizer, 2)
        assert everything(model, optimizer) == expected, i


@pytest.mark.ranks(2)
def test_optimizers_of_torch(disk: Path) -> None:
    """They step masters that lie on a disk; their states are their own."""
    found = []
    for classes in ((), ("masters",), ("masters", "gradients")):
        policy = on_disk(disk, *classes, fraction=0.4)
        model = wide(policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = [step(model, optimizer, number) for number in range(3)]
        found.append((losses, everything(model, optimizer)))
    assert found[0] == found[1] == found[2]
    model = wide(on_disk(disk, "optimizer"))
    loss_of(model, batch(0, fsdpc.rank())).backward()
    before = full_parameters(model)
    said = r"^SGD of torch.optim.sgd keeps its states .*optimizer='disk'.*fsdpc.torch.optim"
    with pytest.raises(NotImplementedError, match=said):
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
    after = full_parameters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    optim.SGD(model.parameters(), lr=1e-2).step()


@pytest.mark.ranks(2)
def test_policies_of_torch_are_taken_as_before() -> None:
    from torch.distributed import fsdp

    found = []
    policies = [None, fsdp.OffloadPolicy(), fsdp.CPUOffloadPolicy(pin_memory=False),
                fsdpc.torch.OffloadPolicy(), fsdpc.torch.CPUOffloadPolicy(False),
                fsdpc.OffloadPolicy(masters="host", optimizer="host")]  # fmt: skip
    for policy in policies:
        model = wide(policy)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        found.append((step(model, optimizer, 0), everything(model, optimizer)))
        assert fsdpc.memory_stats()["disk_file_bytes"] == 0
    assert all(each == found[0] for each in found)
    with pytest.raises(TypeError, match="offload_policy takes"):
        fully_shard(nn.Linear(2, 2), offload_policy="disk")


@pytest.mark.ranks(4, init=False)
def test_ranks_that_shard_nothing_are_not_waited_for(disk: Path) -> None:
    """Two ranks of a mesh open their files while the others have no model."""
    join_gloo(disk)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "dp"))
    if mesh.get_local_rank("role") == 1:
        policy = fsdpc.OffloadPolicy(masters="disk", optimizer="disk", path=disk)
        model = wide(policy, mesh=mesh["dp"])
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        assert fsdpc.memory_stats()["disk_written_bytes"] > 0
    assert not fsdpc.is_initialized()
    dist.destroy_process_group()
