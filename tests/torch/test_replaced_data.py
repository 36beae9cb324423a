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
    assert_same_parameters,
    batch,
    build,
    full,
    full_parameters,
    loss_of,
    shard,
    twin,
)

VALUE = 0.5


def replace(model: nn.Module, value: float = VALUE, how: str = "DTensor") -> None:
    for p in model.parameters():
        if how == "DTensor":
            p.data = torch.full_like(p, value)
        elif how == "full":
            p.data = torch.full(p.shape, value)
        else:
            p._local_tensor = torch.full_like(p._local_tensor, value)


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
@pytest.mark.parametrize("how", ["DTensor", "full", "rows"])
@pytest.mark.parametrize("reader", sorted(READERS))
def test_readers_see_it_at_once_in_every_unit(reader: str, how: str) -> None:
    ours = shard(build())
    for value in (VALUE, 0.25):  # before there is a root, and later
        replace(ours, value, how)
        values = READERS[reader](ours)
        assert values and all(bool((full(v) == value).all()) for v in values)
        loss_of(ours, batch(0, 0)).backward()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("of", ["DTensor", "full"])
def test_vector_to_parameters(of: str) -> None:
    """The vector is the plain model's."""
    plain = build()
    ours = shard(twin(plain))
    vector = nn.utils.parameters_to_vector(ours.parameters())
    expected = nn.utils.parameters_to_vector(plain.parameters()).detach()
    assert torch.equal(full(vector), expected)
    new = 2 * vector.detach() if of == "DTensor" else 2 * full(vector)
    nn.utils.vector_to_parameters(new, ours.parameters())
    nn.utils.vector_to_parameters(2 * expected, plain.parameters())
    assert all(map(torch.equal, forward(ours), forward(plain)))
    assert_same_parameters(ours, plain, rtol=0, atol=0)


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
def test_full_values_in_their_place_are_cut() -> None:
    plain = build()
    ours = shard(twin(plain))
    for model in (ours, plain):
        for p in model.parameters():
            p.data = torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / p.numel()
    assert_same_parameters(ours, plain, rtol=0, atol=0)
    assert all(map(torch.equal, forward(ours), forward(plain)))


@pytest.mark.ranks(2)
def test_values_of_another_shape_are_refused() -> None:
    ours = shard(build())
    p = ours.first.weight
    before = full(p)
    for other in (torch.zeros(10, 7), torch.zeros(20), ours.first.bias.detach()):
        with pytest.raises(ValueError, match=r"was replaced by \(.*first.weight' .*give it a"):
            p.data = other
    with pytest.raises(NotImplementedError, match="assigning .data of a copy of rows .*weight"):
        p.detach().data = torch.zeros_like(p)
    assert torch.equal(full(p), before)
    own = p._local_tensor
    p._local_tensor = torch.zeros(20, 7)
    with pytest.raises(
        ValueError, match=r"were replaced by \(.*this rank has rows .*give it these rows"
    ):
        ours(batch(0, fsdpc.rank()))
    p._local_tensor = own
    assert torch.equal(full(p), before)


SOME_ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "row": lambda t: t[0].fill_(9.0),
    "row of data": lambda t: t.data[15].zero_(),
    "set row": lambda t: t.__setitem__(0, 9.0),
    "set rows": lambda t: t.__setitem__(slice(5, 15), 9.0),
    "set element": lambda t: t.__setitem__((3, 2), 9.0),
    "set column": lambda t: t.__setitem__((slice(None), 1), 9.0),
    "narrow": lambda t: t.narrow(0, 3, 4).zero_(),
    "chunk": lambda t: t.chunk(2)[0].mul_(2),
    "list": lambda t: torch._foreach_mul_(list(t.split(5)), 2.0),
    "diagonal": lambda t: t.diagonal().zero_(),
    "flat": lambda t: t.view(-1)[:3].mul_(2),
    "column": lambda t: t[:, 1].fill_(9.0),
    "transposed": lambda t: t.T.mul_(2),
    "eye": lambda t: nn.init.eye_(t),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("how", SOME_ROWS)
def test_writes_to_some_rows_are_not_lost(how: str) -> None:
    """They are right or raise; torch's DTensor writes to a copy where it moves rows."""
    plain = build()
    ours = shard(twin(plain))
    with torch.no_grad():
        try:
            SOME_ROWS[how](ours.first.weight)
        except (RuntimeError, NotImplementedError):
            return
        SOME_ROWS[how](plain.first.weight)
    assert_same_parameters(ours, plain, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_data_replaced_by_the_user_is_taken_over() -> None:
    model = build()
    ours = shard(model)
    loss_of(ours, batch(0, 0)).backward()
    before = full_parameters(ours)
    averages = {n: p.detach().clone().mul_(0.5) for n, p in ours.named_parameters()}
    for name, p in ours.named_parameters():
        p.data = averages[name]
    with torch.no_grad():
        ours(batch(0, 0))
    for name, p in ours.named_parameters():
        assert torch.equal(full(p), 0.5 * before[name]), name
        assert torch.equal(full(p), full(averages[name])), name


@pytest.mark.ranks(2)
def test_parameters_replaced_later_are_named() -> None:
    ours = shard(build())
    ours.first.weight = nn.Parameter(torch.zeros(20, 7))
    with pytest.raises(RuntimeError, match=r"'first.weight' of unit 'Net' was replaced"):
        ours(batch(0, 0))
