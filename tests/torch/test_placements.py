"""Parameters that are sharded along another dimension than the first (``shard_placement_fn``)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard

import fsdpc
from fsdpc import checkpoint
from fsdpc.torch import (
    clip_grad_norm_,
    full_grad,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    optim,
    set_optimizer_state_dict,
    summon_full_params,
)

from .common import (
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    both,
    build,
    full,
    join_gloo,
    loss_of,
    shard,
    twin,
)


def last(p: nn.Parameter) -> Any:
    """Matrices by columns, vectors by elements."""
    return Shard(p.dim() - 1)


class Kernels(nn.Module):
    """Parameters of up to four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.heads = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bchw,hcd->bd", self.conv(x), self.heads)


MAKERS = {
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-4, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-4, fused=True),
    "for": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-4, foreach=False),
    "ours": lambda ps: optim.AdamW(ps, lr=1e-2, eps=1e-4),
}


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("kind", [*MAKERS])
def test_training_equals_one_process(kind: str) -> None:
    plain = build()
    ours = shard(twin(plain), shard_placement_fn=last)
    theirs = "foreach" if kind == "ours" else kind
    optimizers = [MAKERS[kind](ours.parameters()), MAKERS[theirs](plain.parameters())]
    for step in range(4):
        both(ours, plain, step)
        assert_same_grads(ours, plain)
        clip = (clip_grad_norm_, nn.utils.clip_grad_norm_)[step % 2]
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(full(clip(ours.parameters(), 0.1)), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, plain)


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_dimension(dim: int) -> None:
    """Sizes need not divide, as torch's must."""
    torch.manual_seed(0)
    plain = Kernels()
    ours: Any = copy.deepcopy(plain)
    fully_shard(ours, shard_placement_fn=lambda p: Shard(dim) if p.dim() > 1 else None)
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(fsdpc.rank()))
    for model in (ours, plain):
        model(x).square().mean().backward()
    average_grads(plain)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        own = dim % p.dim() if p.dim() > 1 else 0
        assert q.placements == (Shard(own),) and q.shape == p.shape
        part = p.detach().tensor_split(1, own)[0].chunk(fsdpc.world_size(), own)
        rank = fsdpc.rank()
        assert torch.equal(
            q.detach().to_local(), part[rank] if rank < len(part) else part[0].narrow(own, 0, 0)
        )
        assert torch.equal(q.detach().full_tensor(), p.detach())
        assert torch.equal(q.detach().redistribute(placements=[Replicate()]).to_local(), p)
        torch.testing.assert_close(full_grad(q), p.grad)
        torch.testing.assert_close(q.grad.norm().full_tensor(), p.grad.norm())
        torch.testing.assert_close(full((q.detach() ** 2).sum(own)), (p.detach() ** 2).sum(own))
    with summon_full_params(ours), torch.no_grad():
        ours.heads.copy_(torch.arange(60.0).view(3, 5, 4))
    assert torch.equal(ours.heads.detach().full_tensor().flatten(), torch.arange(60.0))
    torch.manual_seed(4)
    ours.conv.reset_parameters()
    torch.manual_seed(4)
    plain.conv.reset_parameters()
    assert torch.equal(ours.conv.weight.detach().full_tensor(), plain.conv.weight)


@pytest.mark.ranks([2], init=False)
def test_it_is_what_torchs_fully_shard_is(tmp_path: Path) -> None:
    join_gloo(tmp_path)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    models: list[Any] = [copy.deepcopy(plain) for _ in range(2)]
    for model, one in zip(models, (fully_shard, torch_fully_shard), strict=True):
        one(model, mesh=mesh, shard_placement_fn=last)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert p.placements == q.placements and p.shape == q.shape
        torch.testing.assert_close(p.to_local(), q.to_local(), rtol=1e-6, atol=1e-6)
    dcp.save({"model": models[0].state_dict()}, checkpoint_id=tmp_path / "saved")
    state = {"model": models[1].state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    for name, p in models[0].named_parameters():
        assert torch.equal(state["model"][name].full_tensor(), p.full_tensor())


@pytest.mark.ranks([2])
@pytest.mark.parametrize("kind", ["foreach", "ours"])
def test_checkpoints_hold_logical_order(kind: str, tmp_path: Path) -> None:
    """A folder of fsdpc.checkpoint of one placement loads at the other, with its states."""
    runs = []
    for placed in (last, None):
        model = shard(build(), shard_placement_fn=placed)
        optimizer = MAKERS[kind](model.parameters())
        loss_of(model, batch(0, fsdpc.rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        runs.append((model, optimizer))
    for k, (model, optimizer) in enumerate(runs):
        checkpoint.save(tmp_path / str(k), {"model": model, "optimizer": optimizer})
    saved = [(get_model_state_dict(m), get_optimizer_state_dict(m, o)["state"]) for m, o in runs]
    for k, (model, optimizer) in enumerate(reversed(runs)):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        checkpoint.load(tmp_path / str(k), {"model": model, "optimizer": optimizer})
        weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        for name, value in saved[k][0].items():
            assert torch.equal(value, weights[name]), name
            for key, state in saved[k][1][name].items():
                assert torch.equal(state, states["state"][name][key]), (name, key)
    set_optimizer_state_dict(*runs[0], get_optimizer_state_dict(*runs[1]))
    first = runs[0][1].state_dict()
    runs[0][1].load_state_dict(first)


@pytest.mark.ranks(2)
def test_wrong_placements_are_refused() -> None:
    for wrong in (Replicate(), "x", 1):
        with pytest.raises(ValueError, match="for 'weight': it gives None or Shard"):
            fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p, w=wrong: w)
    for dim in (2, -3):
        with pytest.raises(AssertionError, match=f"dim {dim} is invalid for 2D .*'weight'"):
            fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p, d=dim: Shard(d))
    with pytest.raises(fsdpc.MismatchError, match=r"Shard\(1\)"):
        fully_shard(
            nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(min(fsdpc.rank(), p.dim() - 1))
        )
