"""PowerSGD of DDP next to torch's DDP and powerSGD_hook, on gloo."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.distributed.device_mesh import init_device_mesh

import fsdpc
from fsdpc import MismatchError, _core
from fsdpc.torch import (
    Compression,
    DistributedDataParallel,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    PowerSGD,
    full_grad,
    fully_shard,
)

from .common import join_gloo

#: Of gradients and parameters, relative: both round in fp32, and Gram-Schmidt and torch's QR
#: amplify it by the condition of factors.
TOLERANCE = 1e-4


def build() -> nn.Sequential:
    """Matrices whose numbers of columns all differ, one of them of four dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5), nn.Tanh(), nn.Flatten(), nn.Linear(16 * 4, 48), nn.Tanh(),
        nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 2),
    )  # fmt: skip


def loss_of(model: Any, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(16, 3, 6, 6, generator=draw)
    wanted = torch.stack([x[:, 0].mean((1, 2)), (x[:, 1] * x[:, 2]).mean((1, 2))], 1)
    return ((model(x) - 3 * wanted) ** 2).mean()


def draws(rows: int, cols: int, *key: int) -> np.ndarray:
    """The engine's pseudo-random factor."""
    seed = np.uint64(_core.crc32c(0, np.array(key, np.uint64))) << np.uint64(32)
    at = np.arange(rows, dtype=np.uint64)[:, None] << np.uint64(32)
    with np.errstate(over="ignore"):
        z = seed + at + np.arange(cols, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(float) / 2**23 - 1


def give_our_draws(monkeypatch: pytest.MonkeyPatch, model: Any, state: Any, seed: int) -> None:
    """Let torch's hook begin with the engine's random factors, found by their columns."""
    shapes = [shape for _, _, shape in model._fsdpc_unit.params]
    columns = {math.prod(shape[1:]): i for i, shape in enumerate(shapes) if len(shape) > 1}

    def randn(batch: int, cols: int, rank: int, **options: Any) -> torch.Tensor:
        if cols == 1:  # a vector, which the engine sums exactly
            return torch.ones(1, 1, 1)
        found = draws(rank, cols, seed, 0, columns[cols], state.iter + 1, 1).T
        return torch.tensor(found, dtype=torch.float32)[None]

    monkeypatch.setattr(theirs.torch, "randn", randn)


def states(**options: Any) -> tuple[Any, Any]:
    return theirs.PowerSGDState(None, **options), theirs.PowerSGDState(None, **options)


def ratio(ours: torch.Tensor, plain: torch.Tensor) -> float:
    return float((ours - plain).norm() / plain.norm())


OPTIONS = [
    {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2},
    {"matrix_approximation_rank": 4, "start_powerSGD_iter": 3, "random_seed": 7},
    {"matrix_approximation_rank": 3, "start_powerSGD_iter": 2, "warm_start": False},
    {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "use_error_feedback": False},
    {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0, "use_error_feedback": False,
     "warm_start": False, "min_compression_rate": 0.7, "orthogonalization_epsilon": 1e-8},
]  # fmt: skip


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_beside_torch(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_gloo(tmp_path)
    plain = nn.parallel.DistributedDataParallel(build())
    model = DistributedDataParallel(build())
    state, ours = states(**options)
    plain.register_comm_hook(state, theirs.powerSGD_hook)
    model.register_comm_hook(ours, theirs.powerSGD_hook)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model)]
    for step in range(8):
        losses = [loss_of(m, step) for m in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0], rtol=TOLERANCE, atol=0)
        losses[1].backward()
        with monkeypatch.context() as patch:
            give_our_draws(patch, model, state, options.get("random_seed", 0))
            losses[0].backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert ratio(full_grad(p), q.grad) < TOLERANCE, (name, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert state.compression_stats()[0] > 1
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ratio(p.detach(), q.detach()) < TOLERANCE, name
    # gloo's group must outlive the function: its end would hold the GIL while it waits for its
    # threads, which need the GIL to release the hook's futures.


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_shards_with_replicas(dtype: torch.dtype) -> None:
    """A gradient of low rank is exact up to rounding, also in narrow gradients' form."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for replicas in (None, PowerSGD(rank=4, start_step=0)):
        torch.manual_seed(0)
        model = fully_shard(
            nn.Linear(96, 64), mesh=mesh, mp_policy=policy,
            compression=Compression(replicas=replicas),
        )  # fmt: skip
        x = torch.randn(1, 96, generator=torch.Generator().manual_seed(fsdpc.rank()))
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
        grads = [full_grad(p) for p in model.parameters()]
        if replicas is None:
            exact = grads
    for found, wanted in zip(grads, exact, strict=True):
        assert ratio(found, wanted) < (1e-5 if dtype is torch.float32 else 4e-3)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("start_step", [2, 4])
def test_resumed_runs_have_the_same_bits(start_step: int, tmp_path: Path) -> None:
    """The engine has the hook's errors and factors, which its checkpoints contain."""
    join_gloo(tmp_path)

    def made() -> dict[str, Any]:
        model = DistributedDataParallel(build())
        model.register_comm_hook(theirs.PowerSGDState(None, 2, start_step), theirs.powerSGD_hook)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.05, 0.9)}

    def steps(state: dict[str, Any], first: int, last: int) -> list[torch.Tensor]:
        for step in range(first, last):
            loss_of(state["model"], step).backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return [p.detach().clone() for p in state["model"].parameters()]

    state, other = made(), made()
    steps(state, 0, 3)
    fsdpc.checkpoint.save(tmp_path / "saved", state)
    assert not fsdpc.checkpoint.load(tmp_path / "saved", other).zeroed
    assert all(map(torch.equal, steps(other, 3, 6), steps(state, 3, 6)))
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_scalers_see_infinities_once() -> None:
    model = fully_shard(
        nn.Linear(64, 64), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")),
        compression=Compression(replicas=PowerSGD(rank=2, start_step=0)),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = fsdpc.torch.sharded_grad_scaler.ShardedGradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before = model.weight.full_tensor().clone()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(fsdpc.rank()))
        if step == 1 and fsdpc.rank() == 1:
            x[0, 3] = math.inf
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.weight.full_tensor()) == (step == 1)
    assert scaler.get_scale() == 2
    assert torch.isfinite(model.weight.full_tensor()).all()


@pytest.mark.ranks(2, init=False)
def test_refused(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    model = DistributedDataParallel(build())
    with pytest.raises(NotImplementedError, match="knows torch's own .*, powerSGD_hook; read"):
        model.register_comm_hook(states()[0], theirs.batched_powerSGD_hook)
    used = states()[0]
    used.iter = 3
    with pytest.raises(NotImplementedError, match="a PowerSGDState after 3 steps"):
        model.register_comm_hook(used, theirs.powerSGD_hook)
    alone = theirs.PowerSGDState([dist.new_group([r]) for r in range(2)][dist.get_rank()])
    with pytest.raises(NotImplementedError, match="over the model's own 2 ranks"):
        model.register_comm_hook(alone, theirs.powerSGD_hook)
    sharded: Any = FullyShardedDataParallel(build())
    with pytest.raises(NotImplementedError, match="because its mesh has no replicas"):
        sharded.register_comm_hook(states()[0], theirs.powerSGD_hook)
    with pytest.raises(MismatchError, match="powerSGD_hook powersgd1.*powerSGD_hook powersgd2"):
        model.register_comm_hook(
            theirs.PowerSGDState(None, matrix_approximation_rank=1 + dist.get_rank()),
            theirs.powerSGD_hook,
        )
    model.register_comm_hook(states()[0], theirs.powerSGD_hook)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="has a root: its modules, buffers and sums"):
        model.register_comm_hook(states(matrix_approximation_rank=2)[0], theirs.powerSGD_hook)
    dist.destroy_process_group()
