"""Compressed gathers under torch: values by the definition, bytes by the counters of links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fsdpc
from fsdpc import _core
from fsdpc.torch import (
    Compression,
    DistributedDataParallel,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    full_grad,
    fully_shard,
)

from .common import average_grads
from .test_hosts import join_again, leave, links

FORMS = ("bf16", "fp16", "int8", "fp8", "int4")


def rounded(w: torch.Tensor, form: str) -> torch.Tensor:
    """What a matrix's rows are sent as, by the definition."""
    if form in ("bf16", "fp16"):
        return w.to(torch.bfloat16 if form == "bf16" else torch.float16).to(w.dtype)
    if w.ndim < 2 or w.shape[1] < 64:
        return w
    codes, scales = _core.encode_blocks(form, fsdpc.tensor(w.detach().float().numpy()), w.shape[1])
    found = _core.decode_blocks(form, codes, scales, w.shape[1]).numpy()
    return torch.from_numpy(np.array(found)).to(w.dtype)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(320, 66), nn.ReLU(), nn.Linear(66, 8))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_training_is_with_rounded_parameters(form: str) -> None:
    """Straight through: gradients are those at the rounded parameters, masters stay exact."""
    plain, model = build(), build()
    masters = [p.detach().clone().requires_grad_() for p in plain.parameters()]
    fully_shard(model[0], compression=Compression(gather=form))
    fully_shard(model, compression=Compression(gather=form))
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(4):
        with torch.no_grad():
            for p, master in zip(plain.parameters(), masters, strict=True):
                p.copy_(rounded(master, form))
        x = torch.randn(4, 320, generator=torch.Generator().manual_seed(step))
        wanted = plain(x)
        y = model(x)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
        if step == 0:
            assert torch.equal(y, wanted)
        (y**2).mean().backward()
        grads = torch.autograd.grad((wanted**2).mean(), list(plain.parameters()))
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        with torch.no_grad():  # a rounding difference could reach the other level
            for p, master in zip(model.parameters(), masters, strict=True):
                torch.testing.assert_close(p.full_tensor(), master, rtol=1e-3, atol=1e-5)
                master.copy_(p.full_tensor())
    for (name, value), master in zip(model.state_dict().items(), masters, strict=True):
        assert torch.equal(value.full_tensor(), master), name


def sent_in_a_step(dtype: Any, **forms: str) -> int:
    """Bytes that this rank sends to other hosts in the last of three steps."""
    model = fully_shard(
        nn.Linear(512, 256, bias=False), compression=Compression(**forms, every=0),
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        before = links[0].sent_bytes
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return links[0].sent_bytes - before


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sends its rows to each other host once, and nothing else changes."""
    row = {"bf16": 512 * 2, "fp16": 512 * 2, "int8": 512 + 2 * 4, "fp8": 512 + 2 * 4,
           "int4": 256 + 8 * 4}  # fmt: skip
    for hosts in (2, 4):
        join_again(hosts, tmp_path, monkeypatch)
        fsdpc.torch._mesh.join()
        exact, rows = sent_in_a_step(dtype), 256 // 4 * (hosts - 1)
        for form in FORMS:
            saved = exact - sent_in_a_step(dtype, gather=form)
            assert saved == rows * (512 * dtype.itemsize - row[form]), (hosts, form)
            saved = exact - sent_in_a_step(dtype, reduce=form)  # sums are fp32
            assert saved == rows * (512 * 4 - row[form]), (hosts, form)
        if dtype is torch.bfloat16:  # ZeRO-3 sends 2 bytes for each of two gathers and the sums
            both = sent_in_a_step(dtype, gather="int8", reduce="int8")
            assert both < 0.35 * rows * 512 * 6
    leave()


@pytest.mark.ranks(2, init=False)
def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feedback keeps sums of gradients near exact ones; reports name units and their errors."""
    join_again(2, tmp_path, monkeypatch)
    fsdpc.torch._mesh.join()
    drift = {}
    for feedback in (False, True):
        torch.manual_seed(fsdpc.rank())
        x = torch.randn(4, 320)
        forms = {"gather": "int8", "reduce": "int4", "error_feedback": feedback}
        found = []
        for compression in (Compression(**forms), Compression(gather="int8")):
            model = build()
            fully_shard(model[0], compression=compression)
            fully_shard(model, compression=compression)
            found.append(torch.zeros(66, 320))
            for _ in range(16):
                (model(x) ** 2).mean().backward()
                found[-1] += full_grad(model[0].weight)
                model.zero_grad()
            if compression.reduce:
                rows = fsdpc.compression_report(model).operations
        drift[feedback] = float((found[0] - found[1]).norm())
    assert drift[True] < 0.25 * drift[False]
    assert {(row.unit, row.operation, row.form) for row in rows} == {
        (unit, *form) for unit in ("0", "Sequential") for form in
        (("gather", "int8"), ("reduce", "int4"))
    }  # fmt: skip
    assert all(0 < row.error < 0.2 and row.backwards == 0 for row in rows)
    leave()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("make", [torch.optim.AdamW, fsdpc.torch.optim.AdamW])
def test_every_second_backward_is_measured(make: Any) -> None:
    """Whichever optimizer steps the parameters."""
    model = fully_shard(nn.Linear(64, 64), compression=Compression(gather="int8", every=2))
    optimizer = make(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(4):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (row,) = fsdpc.compression_report(model).operations
        seen.append((row.backwards, row.error))
    assert [backwards for backwards, _ in seen] == [0, 0, 2, 2]
    assert seen[0] == seen[1] and seen[1][1] != seen[2][1]


@pytest.mark.ranks(4, init=False)
def test_codes_in_transit_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join_again(2, tmp_path, monkeypatch)
    fsdpc.torch._mesh.join()
    model = fsdpc.nn.Sequential(*(fsdpc.nn.Linear(256, 256, bias=False) for _ in range(4)))
    compression = Compression(gather="int8")
    plan = fsdpc.memory_plan(model, 4, plan={"*": {}}, compression=compression).for_hosts(2)
    for layer in model:
        fsdpc.fully_shard(layer, compression=compression)
    fsdpc.fully_shard(model, compression=compression)
    fsdpc.reset_peak_memory_stats()
    for _ in range(3):
        model(fsdpc.ones(2, 256)).sum().backward()
        fsdpc.optim.SGD(model.parameters(), lr=0.1).step()
    of_a_unit = 2 * (256 // 4) * (256 + 4)  # one message each way
    peak = fsdpc.memory_stats()["staging_peak_bytes"]
    assert of_a_unit <= peak <= plan.staging <= 3 * (of_a_unit + 128)
    assert plan == fsdpc.memory_plan(model)
    leave()


@pytest.mark.ranks(2, init=False)
def test_hooks_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join_again(2, tmp_path, monkeypatch)
    hooks = (default_hooks.allreduce_hook, default_hooks.bf16_compress_hook,
             default_hooks.fp16_compress_hook)  # fmt: skip
    x = torch.randn(4, 320, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain = build()
    (plain(x) ** 2).mean().backward()
    average_grads(plain)
    for hook, error in zip(hooks, (1e-6, 4e-3, 5e-4), strict=True):
        for wrap in (DistributedDataParallel, FullyShardedDataParallel):
            model = wrap(build())
            model.register_comm_hook(None, hook)
            (model(x) ** 2).mean().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                ratio = float((full_grad(p) - q.grad).norm() / q.grad.norm())
                least = -1 if hook is hooks[0] else error / 10
                assert least < ratio < error, (hook, wrap, ratio)
    with pytest.raises(RuntimeError, match="has a root: its modules, buffers and sums"):
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(NotImplementedError, match="knows torch's own allreduce_hook, bf16_"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(NotImplementedError, match="over the model's own 2 ranks"):
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        model.register_comm_hook(alone, default_hooks.bf16_compress_hook)
    model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    leave()


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="compression must be a Compression, got 'int8'"):
        fully_shard(nn.Linear(4, 4), compression="int8")
