"""What scripts for FSDP1 and FSDP2 do beside training: slices, forwards on full copies."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    summon_full_params,
)
from fsdpc.torch.state_dict import local_state_dict

from .common import assert_same_parameters, batch, build, full, loss_of, shard, twin


class Stack(nn.Sequential):
    """A subclass."""


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrap", [fully_shard, FullyShardedDataParallel])
@pytest.mark.parametrize("kind", [nn.Sequential, Stack])
def test_parts_of_containers_are_plain(wrap: Any, kind: type) -> None:
    model = wrap(kind(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    for part in (model[:2], model[1:], model + nn.Sequential(nn.ReLU()), model * 2):
        assert not isinstance(part, FSDPModule) and isinstance(part, nn.Sequential)
    assert type(model[:2]) is kind and list(model[:2]) == [model[0], model[1]]
    if wrap is fully_shard:
        made = type(model)(OrderedDict(a=nn.ReLU()))
        assert type(made) is kind and list(dict(made.named_children())) == ["a"]
    with pytest.raises(RuntimeError, match="'Linear.*|.*0' was called outside"):
        model[:2](torch.ones(1, 3))


@pytest.mark.ranks(1)
def test_the_state_of_a_module() -> None:
    model = shard(build())
    assert fully_shard.state(model).unit is model._fsdpc_unit
    assert fully_shard.state(model.blocks[0]) is not fully_shard.state(model)
    assert fully_shard.state(model.first) is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("when", ["first", "later"])
def test_forward_inside_summon_full_params(recurse: bool, when: str) -> None:
    """FSDP1's recipe for generate()."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    x = batch(0, 0)
    if when == "later":
        loss_of(ours, x).backward()
    with summon_full_params(ours, recurse=recurse, writeback=False), torch.no_grad():
        assert torch.equal(ours(x), plain(x))
        ours.last.weight.zero_()
        assert not ours(x).any()
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))
    with summon_full_params(ours), pytest.raises(RuntimeError, match=r"no_grad\(\), or after"):
        ours(x)
    loss_of(ours, x).backward()


@pytest.mark.ranks(2)
def test_rank_0_alone_computes_with_summoned_copies() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x = batch(0, 0)
    with torch.no_grad():
        expected = ours(x)
        with summon_full_params(ours, rank0_only=True, writeback=False):
            if fsdpc.rank() == 0:
                assert torch.equal(ours(x), expected)
                assert torch.equal(ours.first.weight, plain.first.weight)
            else:
                with pytest.raises(RuntimeError, match="on a rank that keeps its rows"):
                    ours(x)
                with pytest.raises(RuntimeError, match="'Net.first' was called outside"):
                    ours.first(x)


@pytest.mark.ranks([1, 2])
def test_the_tutorials_state_dict_loop(tmp_path: Any) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    wanted = plain.state_dict()
    for found in (
        ours.state_dict(),
        fsdpc.torch.get_model_state_dict(ours),
        ours.first.state_dict(prefix="first."),
        local_state_dict(ours),
    ):
        for name, p in found.items():
            value = full(p)
            assert type(value) is torch.Tensor and torch.equal(value.cpu(), wanted[name])
    found = ours.state_dict()
    assert all(type(p.full_tensor()) is torch.Tensor for p in found.values())
    assert torch.equal(copy.deepcopy(found)["last.weight"].full_tensor(), wanted["last.weight"])
    path = tmp_path / f"{fsdpc.rank()}.pt"
    torch.save(found, path)
    loaded = torch.load(path, weights_only=True)
    assert all(torch.equal(t.full_tensor(), wanted[n]) for n, t in loaded.items())
    fresh = shard(build(seed=8))
    fresh.load_state_dict(loaded)
    assert_same_parameters(fresh, plain, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"mixed .*of 'Net.first.weight' \(20, 7\)"):
        plain.load_state_dict(found)
    plain.load_state_dict({name: full(p) for name, p in found.items()})


@pytest.mark.ranks([1, 3])
def test_copies_of_parameters_gather_their_own_rows() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    named = dict(ours.named_parameters())
    for name, p in plain.named_parameters():
        own = named[name]
        detached = own.detach()
        copies = [own.clone(), detached.clone(), copy.deepcopy(own), detached.double()]
        for each in copies:
            with torch.no_grad():
                each.mul_(2)
            value = each.full_tensor()
            assert torch.equal(value, (2 * p.detach()).to(each.dtype))
            assert value.requires_grad == each.requires_grad
            if each.is_leaf:
                assert torch.equal(copy.deepcopy(each).full_tensor(), value)
        assert torch.equal(own.full_tensor(), p)
        assert copies[2].requires_grad and copies[0].requires_grad


COMPUTED: dict[str, Any] = {
    "sum": lambda p: p.sum(),
    "root of a sum": lambda p: (p**2).sum().sqrt(),
    "sum and number": lambda p: 1 / (p.sum() + 1),
    "product of sums": lambda p: p.sum() * (p**2).sum(),
    "sum and norm": lambda p: torch.maximum(p.abs().sum(), p.norm()),
    "sums of columns": lambda p: p.abs().sum(0).sqrt() + 1,
    "like a sum": lambda p: torch.ones_like(p.sum(0)),
    "mean off": lambda p: (p - p.mean(0)) / p.std(),
    "transposed": lambda p: p.t() * 2,
    "copy of transposed": lambda p: p.t().clone(),
    "transposed twice": lambda p: p.t().double().t(),
    "columns": lambda p: p[:, :3] * 2,
    "rows": lambda p: p[1:3] * 2,
    "joined": lambda p: torch.cat([p, p], 1) * 2,
    "product": lambda p: (p @ p.t()).exp(),
    "number of a sum": lambda p: p.sum().item(),
    "truth of a sum": lambda p: bool((p > 0.99 * p.max()).any()),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("recorded", [True, False])
def test_what_is_computed_from_parameters_is_of_all_rows(recorded: bool) -> None:
    """Also partial sums."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 5)
    ours: Any = twin(plain)
    fully_shard(ours)
    with torch.set_grad_enabled(recorded):
        for name, compute in COMPUTED.items():
            expected = compute(plain.weight)
            found = compute(ours.weight)
            found = full(found) if isinstance(found, torch.Tensor) else found
            torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}")
    other = ours.weight.detach().clone()
    if fsdpc.rank() == fsdpc.world_size() - 1 and other.to_local().numel():
        other.to_local()[-1] += 1
    assert not torch.equal(ours.weight, other) and torch.equal(other, other)


WRITTEN: dict[str, Any] = {
    "row": lambda p: p[4].zero_(),
    "set row": lambda p: p.__setitem__(4, 1.0),
    "set column": lambda p: p.__setitem__((slice(None), 1), 1.0),
    "element": lambda p: p.__setitem__((3, 1), 1.0),
    "rows": lambda p: p[1:4].mul_(2),
    "part": lambda p: p.split(2)[1].zero_(),
    "diagonal": lambda p: p.diagonal().fill_(1),
    "transposed": lambda p: p.t().mul_(2),
    "eye": lambda p: nn.init.eye_(p),
    "orthogonal": lambda p: nn.init.orthogonal_(p),
    "truncated": lambda p: nn.init.trunc_normal_(p),
    "normal": lambda p: nn.init.normal_(p),
    "bernoulli": lambda p: p.bernoulli_(0.5),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("name", list(WRITTEN))
def test_writes_through_views_are_not_lost(name: str) -> None:
    """They reach the rows or are refused, and draws leave every generator where one rank does."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 5)
    ours: Any = twin(plain)
    fully_shard(ours)
    states = []
    for model in (plain, ours):
        torch.manual_seed(1)
        try:
            with torch.no_grad():
                WRITTEN[name](model.weight)
        except (NotImplementedError, RuntimeError) as error:
            assert model is ours and "weight" in str(error)
            return
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(full(ours.weight), plain.weight)
    assert torch.equal(full(ours.bias), plain.bias)
