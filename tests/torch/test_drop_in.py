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

from .common import batch, build, loss_of, shard, twin


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
            full = p.full_tensor()
            assert type(full) is torch.Tensor and torch.equal(full.cpu(), wanted[name])
    found = ours.state_dict()
    assert copy.deepcopy(found)["last.weight"].full_tensor() is not None
    path = tmp_path / f"{fsdpc.rank()}.pt"
    torch.save(found, path)
    loaded = torch.load(path, weights_only=True)
    assert all(type(t) is torch.Tensor and torch.equal(t, wanted[n]) for n, t in loaded.items())
    plain.load_state_dict(found)


@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_copies_of_parameters_gather_their_own_rows(whole: bool) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model, whole_params=list(model.parameters()) if whole else None)
    named = dict(ours.named_parameters())
    for name, p in plain.named_parameters():
        piece = named[name]
        detached = piece.detach()
        copies = [piece.clone(), detached.clone(), copy.deepcopy(piece), detached.double()]
        for each in copies:
            with torch.no_grad():
                each.mul_(2)
            full = each.full_tensor()
            assert torch.equal(full, (2 * p.detach()).to(each.dtype)) and not full.requires_grad
            assert torch.equal(copy.deepcopy(each).full_tensor(), full)
        assert torch.equal(piece.full_tensor(), p)
        assert copies[2].requires_grad and copies[0].requires_grad
