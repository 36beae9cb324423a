"""Muon on sharded torch models, against torch.optim.Muon on the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import (
    fully_shard,
    get_optimizer_state_dict,
    optim,
    set_optimizer_state_dict,
)
from tests.unit.test_muon import newton_schulz_in_float32

from .common import average_grads, batch, build, full, loss_of, shard, twin

LR = 0.02


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() == 2]},
        {"params": [p for p in params if p.dim() != 2], "use_muon": False, "lr": 1e-3},
    ]


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_as_torch(adjust: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices as torch's with iterations in float32; the others as AdamW."""
    patched = "torch.optim._muon._zeropower_via_newtonschulz"
    monkeypatch.setattr(patched, newton_schulz_in_float32)
    model = build()
    plain = twin(model)
    ours = shard(model)
    mine = optim.Muon(groups(ours), lr=LR, adjust_lr_fn=adjust)
    matrices, rest = groups(plain)
    theirs = [
        torch.optim.Muon(matrices["params"], lr=LR, adjust_lr_fn=adjust),
        torch.optim.AdamW(rest["params"], lr=1e-3),
    ]
    for step in range(4):
        x = batch(step, fsdpc.rank())
        for m, optimizers in ((ours, [mine]), (plain, theirs)):
            m.zero_grad()
            loss_of(m, x).backward()
            if m is plain:
                average_grads(plain)
            for optimizer in optimizers:
                optimizer.step()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-4, atol=1e-4, msg=name)
    state = get_optimizer_state_dict(ours, mine)["state"]
    assert set(state["last.weight"]) == {"step", "momentum_buffer"}
    assert set(state["first.bias"]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.ranks(2)
def test_state_is_loaded() -> None:
    model = build()
    plain = twin(model)
    ours, again = shard(model), shard(plain)
    optimizer, fresh = optim.Muon(groups(ours), lr=LR), optim.Muon(groups(again), lr=0.5)

    def train(m: nn.Module, each: Any, steps: range) -> None:
        for step in steps:
            each.zero_grad()
            loss_of(m, batch(step, fsdpc.rank())).backward()
            each.step()

    train(ours, optimizer, range(2))
    train(again, fresh, range(1))
    for p, q in zip(ours.parameters(), again.parameters(), strict=True):
        with torch.no_grad():
            q.copy_(p)
    set_optimizer_state_dict(again, fresh, get_optimizer_state_dict(ours, optimizer))
    train(ours, optimizer, range(2, 4))
    train(again, fresh, range(2, 4))
    for p, q in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
    assert torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5).get_last_lr()[0] == LR / 2


@pytest.mark.ranks(2)
def test_bad_input_is_named() -> None:
    ours = shard(build())
    with pytest.raises(ValueError, match=r"group 0 has '.*first.bias' \(20,\), .*use_muon=False"):
        optim.Muon(ours.parameters())
    with pytest.raises(ValueError, match="adjust_lr_fn is one of"):
        optim.Muon(groups(ours), adjust_lr_fn="other")
    with pytest.raises(ValueError, match="ns_dtype is one of"):
        optim.Muon(groups(ours), ns_dtype=torch.float16)
    with pytest.raises(ValueError, match="belongs to no sharded module"):
        optim.Muon(nn.Linear(2, 2, bias=False).parameters())
    from torch.distributed.tensor import Shard

    moved = fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(NotImplementedError, match="Linear.weight', which is sharded by tensor"):
        optim.Muon(moved.parameters())
