"""State dicts of models and their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import fully_shard

from .common import (
    assert_same_parameters,
    batch,
    both,
    build,
    full,
    full_parameters,
    loss_of,
    shard,
    twin,
)


@pytest.mark.ranks(2)
def test_state_dict_has_every_value() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for _ in range(2):
        state = ours.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert state[name].shape == value.shape
            assert torch.equal(full(state[name]), value), name
        both(ours, plain)
    fresh = build(seed=8)
    target = shard(twin(fresh))
    target.load_state_dict(plain.state_dict())
    assert_same_parameters(target, plain, rtol=0, atol=0)
    partial = {k: v for k, v in fresh.state_dict().items() if k.startswith("first")}
    result = target.load_state_dict(partial, strict=False)
    assert "last.weight" in result.missing_keys
    assert torch.equal(target.first.weight.full_tensor(), fresh.first.weight)
    assert torch.equal(target.last.weight.full_tensor(), plain.last.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(partial)
    loss_of(target, batch(0, 0)).backward()
    whole = fsdpc.torch.get_model_state_dict(ours, rank0_only=True)
    assert len(whole) == (len(plain.state_dict()) if fsdpc.rank() == 0 else 0)


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("rows", [1200, 1001])
def test_full_values_take_no_memory_of_the_engine(rows: int) -> None:
    """They are torch's, which has use for it later; uneven rows come in parts, over a buffer."""
    torch.manual_seed(0)
    layer = nn.Linear(3000, rows)
    whole = {name: value.clone() for name, value in layer.state_dict().items()}
    ours = fully_shard(layer)
    fsdpc.reset_peak_memory_stats()
    before = fsdpc.memory_stats()
    for found in (fsdpc.torch.get_model_state_dict(ours), ours.state_dict()):
        assert all(torch.equal(full(found[name]), value) for name, value in whole.items())
    after = fsdpc.memory_stats()
    staged = after["total_peak_bytes"] - before["total_bytes"]
    assert staged <= (4 << 20) + 64 < whole["weight"].nbytes
    assert after["cached_bytes"] - before["cached_bytes"] <= 5 << 20
    ours(torch.ones(2, 3000)).sum().backward()
    grad = fsdpc.torch.full_grad(ours.weight)
    assert grad.shape == (rows, 3000) and torch.equal(grad, torch.full_like(grad, 2.0))


class Around(nn.Module):
    """A unit with a parameter of its own, and modules that are none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = build(seed=seed)
        self.head = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x)) * self.scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_state_dicts_of_parts_have_every_value_too(when: str) -> None:
    """Parts that are no unit, in front of the first forward and behind it."""
    plain = nn.ModuleDict({"model": Around(3), "more": nn.Linear(3, 3)})
    ours: Any = twin(plain)
    fresh = nn.ModuleDict({"model": Around(9), "more": nn.Linear(3, 3)})
    for block in ours.model.net.blocks:
        fully_shard(block)
    fully_shard(ours.model)
    if when == "after":
        loss_of(ours.model, batch(0, fsdpc.rank())).backward()
    for source in (plain, fresh):
        if source is fresh:
            for part in ("model.net.blocks", "model.net.first", "model.net.last", "model.head"):
                ours.get_submodule(part).load_state_dict(fresh.get_submodule(part).state_dict())
            ours.load_state_dict(fresh.state_dict())
        for part in ("", "model", "model.net", "model.net.blocks", "model.head", "more"):
            found, expected = (m.get_submodule(part).state_dict() for m in (ours, source))
            assert list(found) == list(expected)
            assert all(torch.equal(full(found[name]), expected[name]) for name in expected), part
    torch.testing.assert_close(ours.model(batch(0, 0)), fresh.model(batch(0, 0)))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        ours.model.head.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(3)})


@pytest.mark.ranks(2)
def test_a_state_dict_of_rank_0_alone_needs_nobody() -> None:
    """It has DTensors, as FSDP2's, which are views of this rank's rows."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)
    if fsdpc.rank() == 0:
        for (name, value), p in zip(ours.state_dict().items(), ours.parameters(), strict=True):
            assert value.to_local().data_ptr() == p.to_local().data_ptr(), name
            assert not value.requires_grad and value.shape == p.shape, name
    both(ours, plain)


@pytest.mark.ranks(2, timeout=20)
@pytest.mark.parametrize("read", ["state dict", "full_tensor", "detached"])
def test_whole_values_of_rank_0_alone_are_named_on_both(read: str) -> None:
    ours = shard(build())
    both(ours, build())
    named = "rank 0 posted all_gather of '.*first.weight' .* but rank 1 .*in forward of 'Net'"
    with pytest.raises(fsdpc.PeerError, match=named):
        if fsdpc.rank() == 0:
            if read == "state dict":
                fsdpc.torch.get_model_state_dict(ours)
            elif read == "full_tensor":
                ours.first.weight.full_tensor()
            else:
                ours.state_dict()["first.weight"].full_tensor()
        loss_of(ours, batch(0, 0)).backward()


@pytest.mark.ranks(2)
def test_one_name_of_a_tied_parameter_is_enough() -> None:
    """As safetensors files have one, and scripts load them with strict=False."""
    plain = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    plain[1].weight = plain[0].weight
    for name in ("0.weight", "1.weight"):
        ours: Any = fully_shard(twin(plain), sync_module_states=True)
        value = torch.arange(36.0).view(6, 6)
        found = ours.load_state_dict({name: value}, strict=False)
        assert len(found.missing_keys) == 1
        assert torch.equal(next(ours.parameters()).full_tensor(), value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plain", [False, True])
def test_dtensors_of_another_mesh_are_loaded(plain: bool) -> None:
    """Also into plain parameters, of which this rank has all rows."""
    torch.manual_seed(3)
    source = shard(build())
    torch.manual_seed(4)
    target = build()
    options = {"dtensor": False} if plain else {}
    replicas = fsdpc.init_device_mesh("cpu", (2, 1))
    for module in (*target.blocks, target):
        fully_shard(module, mesh=replicas, **options)
    target.load_state_dict(source.state_dict())
    expected = full_parameters(source)
    for name, value in full_parameters(target).items():
        assert torch.equal(value, expected[name]), name
    for p in source.parameters():
        p.data.zero_()
    if not plain:
        source.load_state_dict(target.state_dict())
        for name, value in full_parameters(source).items():
            assert torch.equal(value, expected[name]), name
