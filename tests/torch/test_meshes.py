"""Groups of ranks with a model each: a dimension of a mesh, a process group of torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdpc
from fsdpc import checkpoint
from fsdpc.torch import (
    FullyShardedDataParallel,
    fully_shard,
)

from .common import (
    assert_same_grads,
    assert_same_parameters,
    assert_same_steps,
    batch,
    both,
    build,
    full,
    join_gloo,
    loss_of,
    shard,
    twin,
)


def train(ours: Any, plain: nn.Module, group: Any) -> None:
    """Two steps; the plain model's gradients are averaged over a group of torch."""
    rank = int(os.environ["RANK"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    for step in range(2):
        for m, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(m, batch(step, rank)).backward()
            if m is plain:
                for p in plain.parameters():
                    dist.all_reduce(p.grad, group=group)
                    p.grad /= dist.get_world_size(group)
            else:
                norm = torch.nn.utils.clip_grad_norm_(ours.parameters(), 1e9)
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(full(norm), theirs)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(ours, plain)


@pytest.mark.ranks(4, init=False)
def test_every_stage_of_a_pipeline_has_a_model(tmp_path: Any) -> None:
    """Models differ in size, so stages make units unequally often."""
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    model = build(seed=stage, dim=20 + stage, blocks=1 + 2 * stage)
    plain = twin(model)
    ours = shard(model, mesh=mesh["dp"])
    assert [c.size for c in ours._fsdpc_state.comms] == [2] and not fsdpc.is_initialized()
    train(ours, plain, mesh["dp"].get_group())
    other = build(seed=5 + dist.get_rank())
    with pytest.raises(fsdpc.MismatchError, match="ranks disagree on the model"):
        fully_shard(other, mesh=mesh["dp"])
    with pytest.raises(NotImplementedError, match="'Net', which 2 of all ranks share"):
        checkpoint.save(tmp_path / "saved", {"model": ours})
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
def test_ranks_that_shard_nothing_are_not_waited_for(tmp_path: Any) -> None:
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "dp"))
    group = dist.new_group([0, 1])
    apart = DeviceMesh("cpu", [0, 1])
    if mesh.get_local_rank("role") == 0:
        for how in ({"device_mesh": mesh["dp"]}, {"process_group": group}):
            for strategy in ("FULL_SHARD", "NO_SHARD"):
                model = build()
                plain = twin(model)
                ours = FullyShardedDataParallel(model, sharding_strategy=strategy, **how)
                train(ours, plain, group)
                optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
                loss_of(ours, batch(0, 0)).backward()
                optimizer.step()
                cls = FullyShardedDataParallel
                states = cls.full_optim_state_dict(ours, optimizer)
                cls.scatter_full_optim_state_dict(states, ours, optim=optimizer)
    else:
        with pytest.raises(ValueError, match=r"rank [23] is not in the mesh"):
            fully_shard(build(), mesh=apart)
        with pytest.raises(ValueError, match=r"rank [23] is not in the process group"):
            FullyShardedDataParallel(build(), process_group=group)
    assert not fsdpc.is_initialized()
    dist.destroy_process_group()


@pytest.mark.ranks(4, init=False)
def test_replicas_of_a_part_of_a_mesh_begin_alike(tmp_path: Any) -> None:
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))
    with pytest.raises(ValueError, match="expects a 1D or 2D DeviceMesh but got DeviceMesh"):
        fully_shard(build(), mesh=mesh)
    with pytest.raises(AssertionError, match="without names.* with mesh_dim_names specified"):
        fully_shard(build(), mesh=init_device_mesh("cpu", (2, 2)))
    model = build()
    plain = twin(model)
    ours = shard(model, mesh=mesh["replicate", "shard"])
    train(ours, plain, dist.group.WORLD)
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2)
def test_hybrid_and_replicated() -> None:
    for shape in ((2, 1), (1, 2)):
        model = build()
        plain = twin(model)
        ours = shard(model, mesh=fsdpc.init_device_mesh("cpu", shape))
        both(ours, plain)
        assert_same_grads(ours, plain)
    model = build()
    plain = twin(model)
    for block in model.blocks:
        fully_shard(block, strategy="NO_SHARD")
    ours = fully_shard(model, strategy="NO_SHARD")
    assert ours.first.weight.shape == (20, 7)
    both(ours, plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(4)
def test_hybrid_two_by_two() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model, mesh=fsdpc.init_device_mesh("cpu", (2, 2)))
    assert_same_steps(ours, plain)


@pytest.mark.ranks(4, init=False)
def test_a_torch_mesh_of_two_dimensions(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build()
    plain = twin(model)
    ours = shard(model, mesh=mesh)
    both(ours, plain)
    assert_same_grads(ours, plain)
    dist.destroy_process_group()
    fsdpc.shutdown()
