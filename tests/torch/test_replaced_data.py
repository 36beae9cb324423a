"""What ``p.data`` was replaced by counts for whatever reads or writes weights next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc import checkpoint
from fsdpc.torch import (
    get_model_state_dict,
    optim,
    summon_full_params,
)

from .common import (
    batch,
    build,
    loss_of,
    shard,
)

VALUE = 0.5


def replace(model: nn.Module, value: float = VALUE) -> None:
    for p in model.parameters():
        p.data = torch.full_like(p, value)


def forward(ours: Any) -> list[torch.Tensor]:
    """Fulls as forward sees them, of every unit."""
    seen: list[torch.Tensor] = []
    handles = [
        m.register_forward_pre_hook(
            lambda m, _: seen.extend(p.detach() + 0 for p in m.parameters(recurse=False))
        )
        for m in ours.modules()
    ]
    with torch.no_grad():
        ours(batch(0, 0))
    for handle in handles:
        handle.remove()
    return seen


def inner_unshard(ours: Any) -> list[torch.Tensor]:
    if ours._fsdpc_state.root is None:
        forward(ours)  # inner units need a root
    ours.blocks[1].unshard()
    values = [p.detach() + 0 for p in ours.blocks[1].parameters()]
    ours.blocks[1].reshard()
    return values


def held(ours: Any) -> list[torch.Tensor]:
    with torch.no_grad(), ours.hold():
        return forward(ours)


def summoned(ours: Any) -> list[torch.Tensor]:
    with summon_full_params(ours):
        return [p.detach() + 0 for p in ours.parameters()]


def applied(ours: Any) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    ours.apply(lambda m: seen.extend(p.detach() + 0 for p in m.parameters(recurse=False)))
    return seen


READERS: dict[str, Callable[[Any], Any]] = {
    "forward": forward,
    "unshard": inner_unshard,
    "hold": held,
    "summon": summoned,
    "apply": applied,
    "full_tensor": lambda ours: [p.full_tensor() for p in ours.parameters()],
    "state_dict": lambda ours: list(ours.state_dict().values()),
    "get_model_state_dict": lambda ours: list(get_model_state_dict(ours).values()),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("reader", sorted(READERS))
def test_readers_see_it_at_once_in_every_unit(reader: str) -> None:
    ours = shard(build())
    for value in (VALUE, 0.25):  # before there is a root, and later
        replace(ours, value)
        values = READERS[reader](ours)
        assert values and all(bool((v == value).all()) for v in values)
        loss_of(ours, batch(0, 0)).backward()


@pytest.mark.ranks([1, 2])
def test_vector_to_parameters() -> None:
    ours = shard(build())
    vector = nn.utils.parameters_to_vector(ours.parameters())
    nn.utils.vector_to_parameters(torch.full_like(vector, VALUE), ours.parameters())
    assert all(bool((v == VALUE).all()) for v in forward(ours))


@pytest.mark.ranks([1, 2])
def test_writers_come_after_it(tmp_path: Any) -> None:
    ours = shard(build())
    loss_of(ours, batch(0, 0)).backward()
    kept = {name: torch.full_like(v, 2.0) for name, v in ours.state_dict().items()}
    replace(ours)
    ours.load_state_dict(kept)
    assert all(bool((v == 2).all()) for v in forward(ours))
    replace(ours, 3.0)
    optimizer = optim.SGD(ours.parameters(), lr=1.0)
    for p in ours.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(bool((v == 2).all()) for v in forward(ours))
    replace(ours, 4.0)
    checkpoint.save(str(tmp_path / "step"), {"model": ours})
    replace(ours, 5.0)
    checkpoint.load(str(tmp_path / "step"), {"model": ours})
    assert all(bool((v == 4).all()) for v in forward(ours))


@pytest.mark.ranks(2)
def test_full_values_in_their_place_are_refused() -> None:
    ours = shard(build())
    p = next(p for p in ours.parameters() if p.dim() == 2 and p.numel() < p.fsdpc.shape.numel())
    p.data = torch.zeros(p.fsdpc.shape)
    with pytest.raises(
        ValueError, match=r"was replaced by \(.*this rank has rows .*give it these rows"
    ):
        ours(batch(0, fsdpc.rank()))


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
def test_parameters_replaced_later_are_named() -> None:
    ours = shard(build())
    ours.first.weight = nn.Parameter(torch.zeros(20, 7))
    with pytest.raises(RuntimeError, match=r"'first.weight' of unit 'Net' was replaced"):
        ours(batch(0, 0))
