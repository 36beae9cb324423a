"""Models that are initialised after sharding, on meta or anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

import fsdpc
from fsdpc.torch import (
    fully_shard,
    set_model_state_dict,
    summon_full_params,
)

from .common import (
    Block,
    Net,
    assert_same_parameters,
    batch,
    build,
    full,
    loss_of,
    shard,
    twin,
)


class Scaled(nn.Module):
    """A module that initialises itself and what is inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.empty(7))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)
        nn.init.normal_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def make() -> Any:
    return nn.Sequential(Scaled(), nn.BatchNorm1d(7), Net(dim=8, blocks=2))


def reset(model: nn.Module) -> None:
    """As scripts do after ``to_empty``."""
    for m in model.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()


def init(m: nn.Module) -> None:
    """As ``_init_weights`` of many models: shapes and random numbers."""
    if isinstance(m, nn.Linear):
        m.weight.data.normal_(0.0, m.weight.shape[0] ** -0.5)
        if m.bias is not None:
            m.bias.data.zero_()
    elif isinstance(m, (nn.LayerNorm, nn.BatchNorm1d)):
        nn.init.ones_(m.weight)
        nn.init.zeros_(m.bias)
    elif isinstance(m, Scaled):
        nn.init.normal_(m.scale)


def sharded(device: str) -> Any:
    with torch.device(device):
        model = make()
    fully_shard(model[0].inner)
    fully_shard(model[0])
    shard(model[2])
    return fully_shard(model)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("how", ["reset", "apply"])
def test_values_are_those_of_the_plain_model(device: str, how: str) -> None:
    torch.manual_seed(0)
    ours, plain = sharded(device), make()
    if device == "meta":
        with pytest.raises(RuntimeError, match="has no values yet"):
            ours(batch(0, 0))
        ours.to_empty(device="cpu")
    for m in (ours, plain):
        torch.manual_seed(5)
        if how == "apply":
            m.apply(init)
            m[1].reset_running_stats()
        else:
            reset(m)
    assert_same_parameters(ours, plain, rtol=0, atol=0)
    torch.testing.assert_close(ours(batch(0, 0)), plain(batch(0, 0)), rtol=1.3e-6, atol=1e-5)
    loss_of(ours, batch(0, 0)).backward()


@pytest.mark.ranks(2)
def test_different_generators_are_named() -> None:
    ours = shard(build())
    torch.manual_seed(fsdpc.rank())
    with pytest.raises(fsdpc.MismatchError, match=r"ranks disagree.*last.weight \(5, 20\)"):
        ours.last.reset_parameters()
    with pytest.raises(fsdpc.MismatchError, match=r"ranks disagree.*linear.weight \(20, 20\)"):
        ours.apply(init)


@pytest.mark.ranks(2)
def test_rank_0_is_taken_on_request() -> None:
    with torch.device("meta"):
        model: Any = Net()
    ours = shard(model, sync_module_states=True).to_empty(device="cpu")
    torch.manual_seed(7 + fsdpc.rank())
    reset(ours)
    plain = Net()
    torch.manual_seed(7)
    reset(plain)
    assert_same_parameters(ours, plain, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_what_apply_leaves_out_still_has_no_values() -> None:
    with torch.device("meta"):
        model: Any = Net()
    ours = shard(model)
    ours.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
    with pytest.raises(RuntimeError, match="'norm.weight' of unit 'blocks.0' .*no values yet"):
        ours(batch(0, 0))
    for block in ours.blocks:
        block.norm.reset_parameters()
    assert ours(batch(0, 0)).isfinite().all()


class Rotary(nn.Module):
    """As of transformers' models: tables that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.register_buffer("table", torch.arange(7.0), persistent=False)
        self.register_buffer("other", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.table)


@pytest.mark.ranks(1)
def test_buffers_that_got_no_values_are_named() -> None:
    """Forward would read whatever the memory held."""
    plain = nn.Sequential(Rotary(), Rotary())
    with torch.device("meta"):
        ours: Any = nn.Sequential(Rotary(), Rotary())
    fully_shard(ours[0])
    fully_shard(ours).to_empty(device="cpu")
    ours.load_state_dict(plain.state_dict())
    for inner, named in ((1, "'0.table', '0.other', '1.table', '1.other'"), (0, "'0.table', '0.o")):
        with pytest.raises(RuntimeError, match=rf"buffers \[{named}.* of unit 'Sequential' were"):
            ours(batch(0, 0))
        ours[inner].table.copy_(plain[0].table)
        ours[inner].other = torch.ones(2)
    assert torch.equal(ours(batch(0, 0)), plain(batch(0, 0)))


@pytest.mark.ranks(2)
def test_sharding_in_inference_mode() -> None:
    with torch.inference_mode():
        ours = shard(build())
    loss_of(ours, batch(0, 0)).backward()
    assert ours.last.weight.grad is not None


@pytest.mark.ranks(2)
def test_apply_inside_forward_copies_nothing() -> None:
    seen: list[Any] = []

    class Looks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.blocks[0].apply(lambda m: seen.append(type(m).__name__))
            return super().forward(x)

    ours = shard(Looks())
    with torch.no_grad():
        ours(batch(0, 0))
    assert seen == ["LayerNorm", "Linear", "FSDPBlock"]


def draw(model: nn.Module, matrices: bool = False) -> None:
    """What scripts do to a plain model."""
    for p in model.parameters():
        if p.dim() > 1 and matrices:
            nn.init.xavier_uniform_(p)
        elif not matrices:
            nn.init.normal_(p, std=0.02)


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize(
    "matrices, after", [(False, "nothing"), (True, "nothing"), (True, "float"), (False, "double")]
)
def test_draws_are_those_of_the_plain_model(matrices: bool, after: str) -> None:
    """From equal generators, each parameter's whole; also if a conversion comes between."""
    plain = build(dim=32)
    ours = shard(twin(plain))
    for model in (ours, plain):
        torch.manual_seed(0)
        draw(model, matrices)
        if after == "double":
            model.double()
            torch.manual_seed(0)
            draw(model, matrices)
        elif after == "float":
            model.float()
    assert_same_parameters(ours, plain, rtol=0, atol=0)
    x = batch(0, 0).to(ours.first.bias.dtype)
    torch.testing.assert_close(ours(x), plain(x), rtol=1.3e-6, atol=1e-5)
    torch.manual_seed(0)
    ours.apply(init)
    assert ours(x).isfinite().all()


DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "uniform_": lambda t: t.data.uniform_(-1, 1),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.detach().exponential_(),
    "kaiming": lambda t: nn.init.kaiming_uniform_(t),
    "truncated": lambda t: nn.init.trunc_normal_(t, std=0.02),
    "orthogonal": lambda t: nn.init.orthogonal_(t),
    "like": lambda t: t.copy_(torch.randn_like(t) + torch.rand_like(t)),
    "dropout": lambda t: t.copy_(nn.functional.dropout(t.detach(), 0.5)),
    "noise": lambda t: t.add_(0.1 * torch.zeros_like(t).normal_()),
    "new": lambda t: t.copy_(t.new_empty(t.shape).normal_()),
    "of a view": lambda t: t.T.normal_(),
    "flat": lambda t: t.view(-1).uniform_(),
    "probabilities": lambda t: t.copy_(torch.bernoulli(t.detach().abs().clamp(0, 1))),
}


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("how", DRAWS)
def test_every_draw_is_of_the_whole(how: str) -> None:
    """Equal numbers in different rows would train, but badly: such a draw raises at least."""
    plain = build(dim=32)
    ours = shard(twin(plain))
    for model in (plain, ours):
        torch.manual_seed(0)
        with torch.no_grad():
            for p in (model.first.weight, model.blocks[0].linear.weight):
                try:
                    DRAWS[how](p)
                except (RuntimeError, NotImplementedError):
                    assert model is ours
                    return
    assert_same_parameters(ours, plain, rtol=0, atol=0)


@pytest.mark.ranks([2, 4])
def test_rows_drawn_from_equal_generators_are_named() -> None:
    """Where scripts draw into the rows themselves."""
    ours = shard(build(dim=32))
    torch.manual_seed(0)
    for p in ours.parameters():
        nn.init.normal_(p.to_local(), std=0.02)
    named = r"initialised .* rank \d has the same numbers in its rows of '.*weight' as rank \d"
    with pytest.raises(RuntimeError, match=named):
        ours(batch(0, 0))
    torch.manual_seed(0)
    draw(ours)
    assert ours(batch(0, 0)).isfinite().all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["other seeds", "full", "constant", "loaded", "replicated"])
def test_what_is_not_drawn_so_is_not_refused(how: str) -> None:
    ours = shard(build(dim=32), strategy="NO_SHARD" if how == "replicated" else None)
    torch.manual_seed(fsdpc.rank() if how == "other seeds" else 0)
    if how == "full":
        with summon_full_params(ours):
            draw(ours)
    elif how == "constant":
        for p in ours.parameters():
            nn.init.constant_(p, 0.5)
    elif how == "loaded":  # what a rank has of it may be another's
        state = {k: full(v)[:1] * torch.ones(v.shape) for k, v in ours.state_dict().items()}
        ours.load_state_dict(state)
    else:
        draw(ours)
    ours(batch(0, 0))


@pytest.mark.ranks([2, 4])
def test_rank_0_alone_has_the_values() -> None:
    torch.manual_seed(fsdpc.rank())
    plain = make().double() if fsdpc.rank() else make()
    with torch.device("meta"):
        model: Any = make()
    mesh = fsdpc.init_device_mesh("cpu", (fsdpc.world_size() // 2, 2))
    for m in model:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    values = plain.state_dict() if fsdpc.rank() == 0 else {}
    set_model_state_dict(model, values, rank0_only=True)
    torch.manual_seed(0)
    expected = make()
    assert_same_parameters(model, expected, rtol=0, atol=0)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    loss_of(model, batch(0, fsdpc.rank())).backward()
    del expected[0].inner.bias
    part = expected.state_dict() if fsdpc.rank() == 0 else {}
    with pytest.raises(RuntimeError, match=r"rank 0's.*missing \['0.inner.bias'\]"):
        set_model_state_dict(model, part, rank0_only=True)
    set_model_state_dict(model, part, rank0_only=True, strict=False)
    part["1.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"of other shapes or complex \['1.weight'\]"):
        set_model_state_dict(model, part, rank0_only=True, strict=False)
    part = {**plain.state_dict(), "more": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"unexpected (\['more'\]|on rank 0)"):
        set_model_state_dict(model, part, rank0_only=True)


@pytest.mark.ranks(2)
def test_meta_models_are_filled_unit_by_unit() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(Block(8), Block(8))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="'norm.weight' of unit .* has no values yet"):
        model(torch.ones(2, 8))
    torch.manual_seed(3)
    plain = nn.Sequential(Block(8), Block(8))
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    assert_same_parameters(model, plain, rtol=0, atol=0)


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("how", ["rows", "distributed", "data"])
def test_shards_are_written_in_place_after_to_empty(how: str) -> None:
    """Rows that the user wrote are values too; what nobody wrote is named, with all of its unit."""
    plain = build()
    with torch.device("meta"):
        ours = shard(Net())
    names = r"training.*: \['Net.first.weight', 'Net.first.bias', 'Net.last.weight'\]"
    with pytest.raises(RuntimeError, match="from meta device before " + names):
        ours(batch(0, fsdpc.rank()))
    ours.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in list(ours.named_parameters())[:-1]:
            begin, end = p.fsdpc.rows
            value = plain.get_parameter(name).detach()
            if how == "rows":
                p.to_local().copy_(value[begin:end])
            elif how == "data":
                p.data = value
            else:
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
    with pytest.raises(RuntimeError, match=r"no values yet: .* not: \['Net.last.weight'\]"):
        ours(batch(0, fsdpc.rank()))
    with torch.no_grad():
        begin, end = ours.last.weight.fsdpc.rows
        ours.last.weight.detach().to_local().copy_(plain.last.weight[begin:end])
    x = batch(0, fsdpc.rank())
    assert torch.equal(ours(x), plain(x))
