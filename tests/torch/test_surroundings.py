"""What stands around a sharded model: process groups, compile, autocast, precision, memory."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdpc
from fsdpc.torch import FSDPModule, MixedPrecisionPolicy, fully_shard, optim

from .common import (
    Block,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    full_parameters,
    loss_of,
    shard,
    twin,
)
from .test_behaviour import assert_same_grads, both


def join_gloo(folder: Any) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


@pytest.mark.ranks(2, init=False)
def test_ranks_on_several_hosts_are_refused_at_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = os.environ["RANK"]
    monkeypatch.setattr("fsdpc.torch._mesh.this_host", lambda: (f"boot {rank}", f"node{rank}"))
    join_gloo(tmp_path)
    with pytest.raises(NotImplementedError, match=r"2 ranks on 2 hosts \(node0, node1\)"):
        fully_shard(build())
    assert not fsdpc.is_initialized()
    dist.destroy_process_group()


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


class Inner(nn.Module):
    """What is compiled: a module of the user's own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * 2


class Outer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.norm = Inner(dim), nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_blocks_are_not_compiled_again(whole: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Outer(8) for _ in range(3)])
    ours = twin(plain)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for i, block in enumerate(ours):
        if whole:
            ours[i] = torch.compile(block, backend=count)
            fully_shard(ours[i])
        else:
            block.inner.compile(backend=count)
            fully_shard(block)
    fully_shard(ours)
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2 * step + fsdpc.rank()))
        for m in (ours, plain):
            m(x).square().mean().backward()
        average_grads(plain)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(fsdpc.torch.full_grad(p), q.grad, rtol=1.3e-6, atol=1e-5)
        ours.zero_grad()
        plain.zero_grad()
        if step == 0:
            compiled = len(graphs)
    assert compiled >= 1 and len(graphs) == compiled


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("low", [False, True])
def test_a_compiled_root_compiles_what_is_the_users(low: bool) -> None:
    """Nothing around units is traced, so nothing is warned of and no fragment compiled."""
    policy = MixedPrecisionPolicy(torch.bfloat16 if low else None, torch.float32)
    model = build()
    plain = shard(twin(model), mp_policy=policy)
    ours = shard(model, mp_policy=policy)
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(ours, backend=keep)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(fsdpc|Dynamo)")
        for step in range(3):
            loss_of(compiled, batch(step, fsdpc.rank())).backward()
            loss_of(plain, batch(step, fsdpc.rank())).backward()
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("gelu" in call for call in calls)
    assert not any("fsdpc" in call or call == "to" for call in calls), calls
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.ranks(2)
def test_autocast() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    x = batch(0, fsdpc.rank())
    for m in (ours, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (m(x).float() ** 2).mean()
        loss.backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_precision_of_compute_and_output() -> None:
    seen: dict[str, torch.dtype] = {}
    model = build()
    model.first.register_forward_pre_hook(lambda m, i: seen.update(x=i[0].dtype, w=m.weight.dtype))
    low = fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
        ),
    )
    y = low(batch(0, 0))
    assert seen == {"x": torch.bfloat16, "w": torch.bfloat16} and y.dtype is torch.float32
    y.sum().backward()
    assert low.first.weight.dtype is low.first.weight.grad.dtype is torch.float32
    half = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    fully_shard(half[1], mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    fully_shard(half)
    assert half(batch(0, 0)).dtype is torch.float16


class Lora(nn.Module):
    """A frozen bf16 base under a trainable fp32 pair."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7, dtype=torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@pytest.mark.ranks(2)
def test_mixed_dtypes_frozen_and_trainable_in_one_unit() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Lora(), nn.GELU(), Lora())
    ours = twin(plain)
    fully_shard(ours[0])
    fully_shard(ours[2])
    fully_shard(ours)
    options = {"lr": 0.1}
    optimizers = [
        optim.AdamW([p for p in ours.parameters() if p.requires_grad], **options),
        torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **options),
    ]
    for step in range(4):
        x = batch(step, fsdpc.rank())
        for m, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            if m is plain:
                average_grads(plain)
            optimizer.step()
    assert ours[0].base.weight.grad is None
    assert_same_parameters(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_meta_models_are_filled_unit_by_unit() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(Block(8), Block(8))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="'norm.weight' of unit .* has no values yet"):
        model(torch.ones(2, 8))
    torch.manual_seed(3)
    plain = nn.Sequential(Block(8), Block(8))
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    assert_same_parameters(model, plain, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_prefetch_lists_and_flags() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    ours.set_modules_to_forward_prefetch([ours.blocks[0], ours.blocks[1]])
    ours.blocks[2].set_modules_to_backward_prefetch([ours.blocks[1], ours.blocks[0]])
    ours.set_reshard_after_backward(False)
    ours.blocks[1].set_unshard_in_backward(False)  # a hint: right even where it is wrong
    for step in range(3):
        last = step == 2
        ours.set_is_last_backward(last)
        both(ours, plain, step)
    for p in plain.parameters():
        p.grad.zero_()
    for step in range(3):
        x = batch(step, fsdpc.rank())
        loss_of(plain, x).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_prefetch_distance() -> None:
    """Of the whole model, whoever is asked: before the first forward the outermost, later any."""
    ours = shard(build())
    with pytest.raises(ValueError, match="the prefetch distance is 0 or more, got -1"):
        ours.set_prefetch_distance(-1)
    ours.set_prefetch_distance(2)
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    first = fsdpc.schedule(ours)
    ours.blocks[1].set_prefetch_distance(3)
    second = fsdpc.schedule(ours)
    assert first and second and first.uses == second.uses
    assert (first.prefetch, second.prefetch) == (2, 3)


@pytest.mark.ranks(2)
def test_ignored_parameters() -> None:
    torch.manual_seed(0)
    model = build()
    keep = model.last.weight
    ours = fully_shard(model, ignored_params={keep})
    assert ours.last.weight is keep and keep.shape == (5, 20)
    loss_of(ours, batch(0, 0)).backward()
    assert keep.grad.shape == (5, 20)
    names = set(ours.state_dict())
    assert "last.weight" in names


@pytest.mark.ranks(2)
def test_data_replaced_by_the_user_is_taken_over() -> None:
    model = build()
    ours = shard(model)
    loss_of(ours, batch(0, 0)).backward()
    averages = {n: p.detach().clone().mul_(0.5) for n, p in ours.named_parameters()}
    for name, p in ours.named_parameters():
        p.data = averages[name]
    with torch.no_grad():
        ours(batch(0, 0))
    for name, p in ours.named_parameters():
        full = p.full_tensor()
        begin, end = p.fsdpc.rows
        rows = full[begin:end] if p.dim() == 2 else None
        if rows is not None:
            assert torch.equal(rows, averages[name]), name


@pytest.mark.ranks(2)
def test_memory_of_a_step() -> None:
    """Shards, not the whole: masters and gradients are halves; nothing grows over steps."""
    model = build(dim=256, blocks=4)
    total = 4 * sum(p.numel() for p in model.parameters())
    ours = shard(model)
    optimizer = optim.AdamW(ours.parameters())
    stats = []
    for step in range(4):
        loss_of(ours, batch(step, fsdpc.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats.append(fsdpc.memory_stats())
    assert stats[-1]["master_bytes"] < 0.55 * total
    assert stats[-1]["grad_bytes"] < 0.55 * total
    assert stats[-1]["state_bytes"] < 1.1 * total
    assert stats[1]["system_allocs"] == stats[3]["system_allocs"]
    assert stats[1]["total_bytes"] == stats[3]["total_bytes"]
    assert isinstance(ours, FSDPModule)


@pytest.mark.ranks(2)
def test_full_parameters_go_when_they_are_cut_up() -> None:
    model = build()
    full = [weakref.ref(p) for p in model.parameters()]
    ours = shard(model)
    gc.collect()
    assert [r for r in full if r() is not None] == []
    assert len(list(ours.parameters())) == len(full)


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("wide", [True, False])
def test_memory_bounds(wide: bool) -> None:
    """Forward: shards, and one copy of the fulls on the host. Backward: gradients and buffers."""
    ranks = fsdpc.world_size()
    model = build(dim=128, blocks=3)
    numel = sum(p.numel() for p in model.parameters())
    largest = sum(p.numel() for p in model.blocks[0].parameters())
    outer = numel - 3 * largest
    dtype = torch.float32 if wide else torch.bfloat16
    ours = shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    for p in ours.parameters():
        p.grad = None

    def held(*kinds: str) -> float:
        """Peaks of all ranks together, each kind by itself."""
        stats = fsdpc.memory_stats()
        return fsdpc.all_reduce(float(sum(stats[f"{kind}_peak_bytes"] for kind in kinds)))

    page = 1.05 * 4096 * ranks * 8  # padding, and the ends of pages
    for _ in range(3):
        fsdpc.reset_peak_memory_stats()
        loss = loss_of(ours, batch(0, fsdpc.rank()).to(dtype))
        fulls = dtype.itemsize * numel
        forward = held("master", "wire")
        assert 4 * numel + fulls <= forward <= 1.05 * (4 * numel + fulls) + page
        loss.backward()
        buffers = dtype.itemsize * ranks * (2 * largest + outer)
        backward = held("master", "wire", "grad", "reduce")
        assert backward <= 1.05 * (8 * numel + fulls + buffers) + page
        ours.zero_grad()
        # FSDP2's bounds, where two units and the outer one are at most what the host shares.
        two_units = dtype.itemsize * (2 * largest + outer)
        assert forward / ranks <= 1.05 * (4 * numel / ranks + two_units) + page
        assert backward / ranks <= 1.05 * (8 * numel / ranks + 2 * two_units) + page
