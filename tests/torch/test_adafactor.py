"""Adafactor on sharded torch models, against torch.optim.Adafactor on the plain one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdpc
from fsdpc import checkpoint
from fsdpc.torch import (
    fully_shard,
    get_optimizer_state_dict,
    optim,
    set_optimizer_state_dict,
)

from .common import average_grads, batch, build, full, loss_of, shard, twin

OPTIONS: list[dict[str, Any]] = [
    dict(lr=0.02),
    dict(lr=0.3, weight_decay=0.1, d=1.5, beta2_decay=-0.5, eps=(1e-3, 1e-2)),
]


def train(model: nn.Module, optimizer: Any, steps: range, plain: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step, fsdpc.rank())).backward()
        if plain:
            average_grads(model)
        optimizer.step()


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_as_torch(options: dict[str, Any]) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    mine = optim.Adafactor(ours.parameters(), **options)
    theirs = torch.optim.Adafactor(plain.parameters(), **options)
    train(ours, mine, range(4))
    train(plain, theirs, range(4), plain=True)
    states = get_optimizer_state_dict(ours, mine)["state"]
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-4, atol=1e-4, msg=name)
        assert states[name].keys() == theirs.state[q].keys()
        for key, want in theirs.state[q].items():
            torch.testing.assert_close(states[name][key], want, rtol=1e-3, atol=1e-9)


@pytest.mark.ranks([2, 3])
def test_states_are_dtensors_and_load(tmp_path: Path) -> None:
    model = build()
    plain = twin(model)
    ours, again, third = shard(model), shard(plain), shard(build())
    optimizer = optim.Adafactor(ours.parameters(), lr=0.1)
    fresh = optim.Adafactor(again.parameters(), lr=0.5)
    train(ours, optimizer, range(2))
    weight = ours.get_parameter("last.weight")
    state = optimizer.state[weight]
    for key, placement in (("row_var", Shard(0)), ("col_var", Replicate())):
        assert isinstance(state[key], DTensor) and state[key].placements == (placement,)
    assert state["row_var"].shape == (weight.shape[0], 1)
    assert state["col_var"].shape == (1, weight.shape[1])
    for p, q in zip(ours.parameters(), again.parameters(), strict=True):
        with torch.no_grad():
            q.copy_(p)
    train(again, fresh, range(1))  # states that loading replaces
    for p, q in zip(ours.parameters(), again.parameters(), strict=True):
        with torch.no_grad():
            q.copy_(p)
    set_optimizer_state_dict(again, fresh, get_optimizer_state_dict(ours, optimizer))
    checkpoint.save(tmp_path / "saved", {"model": ours, "optimizer": optimizer})
    saved = copy.deepcopy(optimizer.state_dict())
    train(ours, optimizer, range(2, 4))
    train(again, fresh, range(2, 4))
    loaded = optim.Adafactor(third.parameters(), lr=0.5)
    checkpoint.load(tmp_path / "saved", {"model": third, "optimizer": loaded})
    loaded.load_state_dict(saved)
    train(third, loaded, range(2, 4))
    for p, q, r in zip(ours.parameters(), again.parameters(), third.parameters(), strict=True):
        assert torch.equal(full(p), full(q)) and torch.equal(full(p), full(r))


@pytest.mark.ranks([1, 2])
def test_checkpoints_load_natively(tmp_path: Path) -> None:
    """Both frontends write the same states, under the same names."""
    layer = nn.Linear(6, 5)
    ours = fully_shard(layer)
    optimizer = optim.Adafactor(ours.parameters())
    ours(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "saved", {"model": ours, "optimizer": optimizer})
    native = fsdpc.nn.Linear(6, 5)
    loaded = fsdpc.optim.Adafactor(native.parameters(), lr=0.5)
    checkpoint.load(tmp_path / "saved", {"model": native, "optimizer": loaded})
    held = loaded.state(native.weight)
    want = get_optimizer_state_dict(ours, optimizer)["state"]["weight"]
    for key in ("row_var", "col_var"):
        assert held[key].shape == tuple(want[key].shape)
        assert (held[key].numpy() == want[key].numpy()).all()


@pytest.mark.ranks(2)
def test_bad_input_is_named() -> None:
    ours = shard(build())
    with pytest.raises(ValueError, match="d is out of range: 0.5"):
        optim.Adafactor(ours.parameters(), d=0.5)
    with pytest.raises(ValueError, match="belongs to no sharded module"):
        optim.Adafactor(nn.Linear(2, 2).parameters())
    moved = fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(NotImplementedError, match="Adafactor needs whole rows of 'Linear.weight'"):
        optim.Adafactor(moved.parameters())


@pytest.mark.ranks([1, 2])
def test_full_states_are_copies() -> None:
    ours = shard(build())
    optimizer = optim.Adafactor(ours.parameters())
    train(ours, optimizer, range(1))
    held = get_optimizer_state_dict(ours, optimizer)["state"]
    before = copy.deepcopy(held)
    train(ours, optimizer, range(1, 3))
    for name, states in before.items():
        for key, value in states.items():
            assert torch.equal(held[name][key], value), (name, key)


@pytest.mark.ranks(2)
def test_states_of_another_rank_or_kind_are_named(tmp_path: Path) -> None:
    layer = fully_shard(nn.Linear(6, 10, bias=False))
    optimizer = optim.Adafactor(layer.parameters())
    layer(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / f"{fsdpc.rank()}.pt")
    fsdpc.barrier()
    if fsdpc.rank() == 1:  # a rank loads by itself
        wrong = torch.load(tmp_path / "0.pt", weights_only=False)
        with pytest.raises(ValueError, match="'row_var' in the state dict is of"):
            optimizer.load_state_dict(wrong)
        optimizer.load_state_dict(torch.load(tmp_path / "1.pt", weights_only=False))
    other = optim.AdamW(layer.parameters())
    other.step()
    with pytest.raises(KeyError, match="Adafactor needs .*row_var.* of 'Linear.weight'"):
        set_optimizer_state_dict(layer, optimizer, get_optimizer_state_dict(layer, other))
