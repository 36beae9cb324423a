"""DDP's scripts, and what published FSDP scripts do besides: hints, checks, other import paths."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join

import fsdpc
from fsdpc.torch import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DistributedDataParallel,
    FullyShardedDataParallel,
    fully_shard,
    summon_full_params,
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


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("stepped", [False, True])
def test_an_optimizer_that_was_made_before(stepped: bool) -> None:
    """As DDP's scripts make it, and nanoGPT's, which load its states first."""
    model, rank = build(), fsdpc.rank()
    plain = twin(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 100)
    if stepped:
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            loss_of(m, batch(9, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    model = DistributedDataParallel(model)
    held = [p for group in optimizers[0].param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        loss_of(plain, batch(step, rank)).backward()
        average_grads(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    assert_same_parameters(model, plain)
    assert all(len(optimizer.state) == len(held) for optimizer in optimizers)


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
@pytest.mark.parametrize("how", ["DDP", "replicate", "inside"])
def test_ddp_of_what_units_do_not_hold(how: str, tmp_path: Any) -> None:
    """Torch's DDP reduces what it is not told to ignore; replicate() and units skip each other."""
    from torch.distributed._composable import replicate

    join_gloo(tmp_path)
    wrap = nn.parallel.DistributedDataParallel
    plain = build()
    model = twin(plain)
    for block in model.blocks[:2]:
        fully_shard(block, ignored_params=block.norm.parameters() if how == "DDP" else None)
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "fsdpc")]
    assert len(sharded) == (4 if how == "DDP" else 8)
    wrap._set_params_and_buffers_to_ignore_for_model(model, sharded[1:])
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel around Net.* ignore them"):
        wrap(model)
    wrap._set_params_and_buffers_to_ignore_for_model(model, sharded)
    with pytest.raises(RuntimeError, match=r"\.DataParallel around Net"):
        nn.DataParallel(model)
    if how == "inside":
        replicate(model.last)
    outer = {"DDP": wrap, "replicate": replicate, "inside": fully_shard}[how](model)
    assert not hasattr(model.last.weight, "fsdpc")
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
        value = ours.full_tensor() if hasattr(ours, "fsdpc") else ours.detach()
        torch.testing.assert_close(value, p.detach(), msg=lambda m, n=name: f"{n}: {m}")
    dist.destroy_process_group()


class Counted(nn.Module):
    """Batch norms, a running sum that forward adds to, and a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("table", torch.arange(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.detach().sum()
        return self.last(self.norm(self.first(x))) + self.seen.sum()


def counted(seed: int) -> Counted:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Counted()
    model.seen += seed  # ranks begin with different buffers
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}], ids=str
)
def test_buffers_are_sent_when_torchs_ddp_sends_them(
    options: dict[str, Any], tmp_path: Any
) -> None:
    join_gloo(tmp_path)
    compare_buffers(options)
    # torch's DDP is gone, and gloo's threads have the GIL to end their work: a process group that
    # its destructor ends would wait for them with the GIL held.
    time.sleep(0.2)
    dist.destroy_process_group()


def compare_buffers(options: dict[str, Any]) -> None:
    rank = fsdpc.rank()
    ours = DistributedDataParallel(counted(3 + rank), **options)
    theirs: Any = nn.parallel.DistributedDataParallel(counted(3 + rank), **options)
    assert ours.broadcast_buffers == theirs.broadcast_buffers == (not options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (ours, theirs)]

    def same() -> None:
        theirs_now = dict(theirs.module.named_buffers())
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, theirs_now[name], rtol=1e-6, atol=1e-6)

    same()
    for step in range(4):
        for micro in range(2):
            x = batch(step, rank, micro)
            losses = []
            for m in (ours, theirs):
                with contextlib.nullcontext() if micro else m.no_sync():
                    losses.append(loss_of(m, x))
                    losses[-1].backward()
            torch.testing.assert_close(*losses)
            same()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            outputs = []
            for m in (ours, theirs):
                m.eval()
                with torch.no_grad():
                    outputs.append(m(batch(9, 9)))
                m.train()
            torch.testing.assert_close(*outputs)
            same()
            of_ranks = fsdpc.all_gather(outputs[0].numpy()).reshape(2, -1)
            assert np.array_equal(of_ranks[0], of_ranks[1]) == (not options)


@pytest.mark.ranks(2)
def test_forwards_that_send_no_buffers() -> None:
    """Recomputation, ``hold()`` and a rank that evaluates ``model.module`` alone."""
    rank = fsdpc.rank()
    model = DistributedDataParallel(counted(3 + rank))
    x = batch(0, rank).requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    # Rank 0's first value, to which this rank's forward and recomputation added.
    torch.testing.assert_close(model.seen, torch.full((2, 3), 3 + 2 * x.detach().sum()))
    model(batch(1, rank)).sum().backward()
    before = model.seen.clone()
    with torch.no_grad():
        if rank == 0:
            model.module(batch(9, 9))
        assert torch.equal(model.seen, before) or rank == 0
        model.eval()
        with summon_full_params(model, writeback=False, rank0_only=True):
            if rank == 0:
                model(batch(9, 9))
        with model.hold():
            ends = [model(batch(9, 9)).numpy() for _ in range(1 + rank)]
    np.testing.assert_array_equal(*fsdpc.all_gather(ends[0]).reshape(2, -1))


@pytest.mark.ranks(2)
def test_what_ddp_is_to_ignore() -> None:
    rank = fsdpc.rank()
    plain = counted(3 + rank)
    names = ["last.bias", "seen"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, names)
    model = DistributedDataParallel(plain)
    assert not hasattr(model.last.bias, "fsdpc") and hasattr(model.last.weight, "fsdpc")
    assert model.seen[0, 0] == 3 + rank
    for _ in range(2):
        model(torch.full((2, 7), float(rank))).sum().backward()
    assert model.seen[0, 0] == 3 + rank + 2 * 14 * rank
    assert torch.equal(model.norm.num_batches_tracked, torch.tensor(2))


@pytest.mark.ranks(2)
def test_ddp_without_an_initial_sync() -> None:
    DistributedDataParallel(counted(3), init_sync=False)
    with pytest.raises(fsdpc.MismatchError, match=r"first\.weight"):
        DistributedDataParallel(counted(3 + fsdpc.rank()), init_sync=False)


@pytest.mark.ranks([1, 2])
def test_sync_batch_norm_without_a_process_group() -> None:
    """torch's computes with each rank's own statistics there."""
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    if fsdpc.world_size() == 1:
        fully_shard(model)
        return
    with pytest.raises(RuntimeError, match=r"SyncBatchNorm '1' on 2 ranks, and torch.distributed"):
        fully_shard(model)


@pytest.mark.ranks(1)
def test_what_ddp_refuses() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="join: ranks take equal numbers of steps"):
        model.join()
    with pytest.raises(NotImplementedError, match="join: ranks take equal numbers of steps"):
        Join([model])
    with pytest.raises(ValueError, match="only be None or contain a single element"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    with pytest.raises(ValueError, match=r"SyncBatchNorm layers only work with GPU.*'1' is on"):
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


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
    assert (
        [a[: len(b)] for a, b in zip(said, begin, strict=True)] == begin
        if (fsdpc.rank() == 0)
        else said == []
    )


@pytest.mark.ranks(2)
def test_how_scripts_look_at_parameters() -> None:
    from fsdpc.torch.fully_sharded_data_parallel import FullyShardedDataParallel as same

    assert same is FullyShardedDataParallel
    model = build()
    full = {name: p.shape for name, p in model.named_parameters()}
    assert not any(hasattr(p, "_local_tensor") for p in model.parameters())
    fully_shard(model)
    for name, p in model.named_parameters():
        assert hasattr(p, "_local_tensor")
        assert p._local_tensor.data_ptr() == p.to_local().data_ptr()
        assert p.shape == p.fsdpc.shape == full[name]
        begin, end = p.fsdpc.rows
        assert p._local_tensor.shape == (end - begin, *full[name][1:])
    torch.manual_seed(fsdpc.rank())
    with pytest.raises(fsdpc.MismatchError, match="with the same seed.* sync_module_states=True"):
        fully_shard(nn.Linear(2, 2))
