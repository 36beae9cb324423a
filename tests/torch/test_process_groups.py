"""Ranks of torch.distributed: beside torch's FSDP2 in one process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdpc

from .common import (
    batch,
    build,
    full_parameters,
    join_gloo,
    loss_of,
    shard,
    twin,
)


@pytest.mark.ranks(2, init=False)
def test_a_group_that_no_environment_numbers(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of torch.multiprocessing: init() does not take each rank for a world of one."""
    join_gloo(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    fsdpc.init(deterministic=True)
    assert (fsdpc.rank(), fsdpc.world_size()) == (dist.get_rank(), 2)
    assert fsdpc.distributed.is_deterministic()
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False)
def test_as_fsdp2_in_the_same_process_group(tmp_path: Any) -> None:
    """torch.distributed alone is initialised; a torch mesh; ten steps beside torch's FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as theirs

    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2,))
    model = build()
    reference: Any = twin(model)
    for block in reference.blocks:
        theirs(block, mesh=mesh)
    theirs(reference, mesh=mesh)
    ours = shard(model, mesh=mesh)
    assert fsdpc.world_size() == 2
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ours, reference)]
    for step in range(10):
        x = batch(step, fsdpc.rank())
        losses = []
        for m, optimizer in zip((ours, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(m, x)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            losses.append((loss.detach(), getattr(norm, "full_tensor", lambda n=norm: n)()))
        torch.testing.assert_close(losses[0], losses[1], rtol=1.3e-6, atol=1e-5)
    values = full_parameters(ours)
    for name, p in reference.named_parameters():
        full = p.full_tensor()
        torch.testing.assert_close(values[name], full.detach(), rtol=1.3e-6, atol=1e-5)
    dist.destroy_process_group()
    fsdpc.shutdown()
