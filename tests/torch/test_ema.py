"""Averages of sharded torch models, against torch's AveragedModel of the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import fsdpc
from fsdpc import checkpoint
from fsdpc.torch import EMA, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, optim

from .common import batch, build, full, full_parameters, loss_of, shard, twin


def train(model: Any, ema: EMA, steps: range = range(4), make: Any = optim.AdamW) -> list[Any]:
    """Full parameters after each step, after which averages are updated."""
    optimizer = make(model.parameters(), lr=1e-2)
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step, fsdpc.rank())).backward()
        optimizer.step()
        ema.update()
        found.append(full_parameters(model))
    return found


def averages_of(plain: nn.Module, found: list[Any], decay: float) -> dict[str, torch.Tensor]:
    """Let torch average the plain model, whose parameters are set to these."""
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for values in found:
        plain.load_state_dict(values)
        averaged.update_parameters(plain)
    return {name: p.detach() for name, p in averaged.module.named_parameters()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def check_swap(model: Any, ema: EMA) -> None:
    before, inside = full_parameters(model), ema.state_dict()["averages"]
    with ema.swap():
        assert_equal(full_parameters(model), inside)
        loss = loss_of(model, batch(9, 0))
    assert_equal(full_parameters(model), before)
    assert_equal(ema.state_dict()["averages"], inside)
    assert not torch.equal(loss, loss_of(model, batch(9, 0)))


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("decay", [0.9, 0.3])
@pytest.mark.parametrize("make", [optim.AdamW, torch.optim.AdamW])
def test_as_torch(decay: float, make: Any) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    ema = EMA(ours, decay)
    found = train(ours, ema, make=make)
    expected = averages_of(plain, found, decay)
    assert_equal(ema.state_dict()["averages"], expected)
    check_swap(ours, ema)
    plain.load_state_dict(expected)
    with ema.swap(), torch.no_grad():
        x = batch(7, fsdpc.rank())
        torch.testing.assert_close(ours(x), plain(x))


def double(model: Any) -> Any:
    return shard(model.double())


def narrow(model: Any) -> Any:
    return shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def by_columns(model: Any) -> Any:
    return shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", [double, narrow, by_columns, FullyShardedDataParallel])
def test_other_ways_to_shard(how: Callable[[Any], Any], tmp_path: Path) -> None:
    model = build()
    plain = twin(model)
    ours = how(model)
    x = (lambda step: batch(step, 0).double()) if how is double else (lambda step: batch(step, 0))
    plain = plain.double() if how is double else plain
    ema, optimizer = EMA(ours, 0.9), optim.AdamW(ours.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ours, x(step)).backward()
        optimizer.step()
        ema.update()
        found.append({n.removeprefix("module."): v for n, v in full_parameters(ours).items()})
    averages = ema.state_dict()["averages"]
    expected = averages_of(plain, found, 0.9)
    for name, value in averages.items():  # fp64 has no fused operations here
        wanted, off = expected[name.removeprefix("module.")], 1e-15 * (how is double)
        torch.testing.assert_close(value, wanted, rtol=off, atol=off)
    before = full_parameters(ours)
    with ema.swap():
        loss_of(ours, x(0))
    assert_equal(full_parameters(ours), before)
    checkpoint.save(tmp_path / "saved", {"model": ours, "ema": ema})
    again = EMA(ours, 0.9)
    checkpoint.load(tmp_path / "saved", {"model": ours, "ema": again})
    assert_equal(again.state_dict()["averages"], averages)
    assert again.num_updates == 3


@pytest.mark.ranks(2)
def test_state_dict_and_frozen() -> None:
    model = build()
    model.first.requires_grad_(False)
    ours = shard(model)
    ema = EMA(ours, 0.9, every=2)
    train(ours, ema, range(5))
    state = ema.state_dict()
    assert (state["num_updates"], state["calls"]) == (2, 5)
    assert set(state["averages"]) == {n for n, _ in ours.named_parameters() if n[:5] != "first"}
    assert state["averages"]["last.weight"].shape == (5, 20)
    again = EMA(ours, 0.9, every=2)
    again.load_state_dict(state)
    assert_equal(again.state_dict()["averages"], state["averages"])
    ema.update()
    again.update()
    assert_equal(again.state_dict()["averages"], ema.state_dict()["averages"])
    ours.first.requires_grad_(True)
    train(ours, ema, range(5, 7))
    assert "first.weight" in ema.state_dict()["averages"]
    with pytest.raises(KeyError, match="unexpected .*'x'"):
        ema.load_state_dict({**state, "averages": {"x": torch.zeros(2)}})


@pytest.mark.ranks(1)
def test_native_checkpoints(tmp_path: Path) -> None:
    """One frontend's averages load in the other."""
    native = fsdpc.fully_shard(fsdpc.nn.Linear(6, 5))
    theirs = fsdpc.EMA(native, 0.9)
    theirs.update()
    checkpoint.save(tmp_path / "saved", {"model": native, "ema": theirs})
    ours = fully_shard(nn.Linear(6, 5))
    ema = EMA(ours, 0.9)
    checkpoint.load(tmp_path / "saved", {"model": ours, "ema": ema})
    expected = theirs.state_dict()["averages"]
    for name, value in ema.state_dict()["averages"].items():
        assert torch.equal(value, torch.from_dlpack(expected[name])), name


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


@pytest.mark.ranks(1)
def test_buffers_are_the_models() -> None:
    ours = fully_shard(WithBatchNorm())
    ema = EMA(ours, 0.9)
    train(ours, ema, range(3))
    mean = ours.norm.running_mean.clone()
    with ema.swap():
        assert torch.equal(ours.norm.running_mean, mean)
        update_bn([batch(step, 0) for step in range(3)], ours)
        assert not torch.equal(ours.norm.running_mean, mean)


@pytest.mark.ranks(2)
def test_what_is_refused() -> None:
    ours = shard(build())
    with pytest.raises(AssertionError, match="EMA instead of AveragedModel"):
        AveragedModel(ours)
    with pytest.raises(ValueError, match=r"decay must be a number in \[0, 1\), got 1.5"):
        EMA(ours, 1.5)
    with pytest.raises(ValueError, match="not sharded, the first is 'weight': call fully_shard"):
        EMA(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'weight' \(bfloat16\)"):
        EMA(fully_shard(nn.Linear(2, 2).bfloat16()))
    ema, optimizer = EMA(ours), optim.AdamW(ours.parameters())
    loss_of(ours, batch(0, 0)).backward()
    ema.update()
    before = full_parameters(ours)
    with pytest.raises(ZeroDivisionError), ema.swap():
        with pytest.raises(RuntimeError, match=r"swap\(\) before an optimizer steps them"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"update\(\) inside swap\(\)"):
            ema.update()
        raise ZeroDivisionError
    assert_equal(full_parameters(ours), before)
    optimizer.step()
    assert not torch.equal(full(ours.last.weight), before["last.weight"])
