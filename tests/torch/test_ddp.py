"""DDP's scripts, and what published FSDP scripts do besides: hints, checks, other import paths."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdpc
from fsdpc.torch import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DistributedDataParallel,
    FullyShardedDataParallel,
    fully_shard,
)

from .common import (
    assert_same_parameters,
    average_grads,
    batch,
    build,
    join_gloo,
    loss_of,
    twin,
)


@pytest.mark.ranks([1, 2, 3])
def test_a_script_of_ddp() -> None:
    """Seeds differ; rank 0 alone evaluates and saves; micro-steps are added up locally."""
    rank = fsdpc.rank()
    plain = build(seed=3)
    model = DistributedDataParallel(
        build(seed=3 + rank), device_ids=[rank], output_device=rank, find_unused_parameters=True
    )
    assert isinstance(model, DistributedDataParallel) and type(model.module) is not type(model)
    assert_same_parameters(model, plain, rtol=0, atol=0)
    assert model.first.weight.shape == (20, 7)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for step in range(3):
        with model.no_sync():
            loss_of(model, batch(step, rank, 1)).backward()
        loss_of(model, batch(step, rank)).backward()
        for micro in (1, 0):
            loss_of(plain, batch(step, rank, micro)).backward()
        average_grads(plain)
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                torch.testing.assert_close(model(batch(9, 9)), plain(batch(9, 9)))
            twin(plain).load_state_dict(model.module.state_dict())
    assert_same_parameters(model, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
def test_ddp_of_what_units_do_not_hold(how: str, tmp_path: Any) -> None:
    """Told to ignore the pieces, torch's DDP reduces the other parameters alone."""
    from torch.distributed._composable import replicate

    join_gloo(tmp_path)
    wrap = nn.parallel.DistributedDataParallel
    plain = build()
    model = twin(plain)
    for block in model.blocks[:2]:
        fully_shard(block, ignored_params=block.norm.parameters())
    pieces = [name for name, p in model.named_parameters() if hasattr(p, "fsdpc")]
    assert pieces == [f"blocks.{k}.linear.{key}" for k in (0, 1) for key in ("weight", "bias")]
    wrap._set_params_and_buffers_to_ignore_for_model(model, pieces[1:])
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel around Net.* ignore pieces"):
        wrap(model)
    wrap._set_params_and_buffers_to_ignore_for_model(model, pieces)
    with pytest.raises(RuntimeError, match=r"\.DataParallel around Net"):
        nn.DataParallel(model)
    linears = [block.linear for block in model.blocks[:2]]
    outer = wrap(model) if how == "DDP" else replicate(model, ignored_modules=linears)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (outer, plain)]
    for step in range(3):
        x = batch(step, fsdpc.rank())
        loss_of(outer, x).backward()
        loss_of(plain, x).backward()
        average_grads(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in plain.named_parameters():
        ours = model.get_parameter(name)
        value = ours.full_tensor() if name in pieces else ours.detach()
        torch.testing.assert_close(value, p.detach(), msg=lambda m, n=name: f"{n}: {m}")
    dist.destroy_process_group()


@pytest.mark.ranks(1)
def test_options_of_ddp() -> None:
    DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=25, static_graph=True)
    for option in ("mixed_precision", "delay_all_reduce_named_params", "nonsense"):
        with pytest.raises(NotImplementedError, match=rf"DistributedDataParallel\({option}=...\)"):
            DistributedDataParallel(nn.Linear(2, 2), **{option: object()})


@pytest.mark.ranks(2)
def test_what_changes_nothing_is_said_once() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdpc.torch").addHandler(handler)
    FullyShardedDataParallel(nn.Linear(2, 2), sync_module_states=True, device_id=0)
    assert said == []
    for _ in range(2):
        FullyShardedDataParallel(
            nn.Linear(2, 2),
            sync_module_states=True,
            cpu_offload=CPUOffload(offload_params=True),
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            forward_prefetch=True,
        )
        unit = fully_shard(
            nn.Linear(2, 2), sync_module_states=True, offload_policy=CPUOffloadPolicy()
        )
        unit.set_allocate_memory_from_process_group_for_comm(False)
        unit.set_reduce_scatter_max_input_buffers(2)
    unit.set_allocate_memory_from_process_group_for_comm(True)
    for n in (1, 3):
        unit.set_reduce_scatter_max_input_buffers(n)
    begin = [
        "cpu_offload changes",
        "backward_prefetch, forward",
        "CPUOffloadPolicy changes",
        "set_allocate_memory_from_process_group_for_comm changes",
        "set_reduce_scatter_max_input_buffers changes",
    ]
    assert [a[: len(b)] for a, b in zip(said, begin, strict=True)] == begin if (
        fsdpc.rank() == 0
    ) else said == []


@pytest.mark.ranks(2)
def test_how_scripts_look_at_parameters() -> None:
    from fsdpc.torch.fully_sharded_data_parallel import FullyShardedDataParallel as same

    assert same is FullyShardedDataParallel
    model = build()
    full = {name: p.shape for name, p in model.named_parameters()}
    assert not any(hasattr(p, "_local_tensor") for p in model.parameters())
    fully_shard(model)
    for name, p in model.named_parameters():
        assert hasattr(p, "_local_tensor") and p._local_tensor.data_ptr() == p.data_ptr()
        assert p._local_tensor.shape == p.shape and p.fsdpc.shape == full[name]
    torch.manual_seed(fsdpc.rank())
    with pytest.raises(fsdpc.MismatchError, match="with the same seed.* sync_module_states=True"):
        fully_shard(nn.Linear(2, 2))
