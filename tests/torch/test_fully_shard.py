"""fully_shard under torch: parity with a plain model on averaged gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import _foreach_supported_types

import fsdpc
import fsdpc.torch
from fsdpc.torch import fully_shard
from tests.events import event_counts

from .common import (
    assert_same_grads,
    assert_same_parameters,
    assert_same_steps,
    average_grads,
    batch,
    both,
    build,
    full,
    full_parameters,
    loss_of,
    shard,
    train_twins,
    twin,
)


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False, None, 2])
def test_ten_adam_steps(reshard: Any) -> None:
    if reshard == 2 and fsdpc.world_size() == 1:
        reshard = 1
    model = build()
    plain = twin(model)
    ours = shard(model, reshard_after_forward=reshard)
    optimizers = (
        torch.optim.Adam(ours.parameters(), lr=1e-2),
        torch.optim.Adam(plain.parameters(), lr=1e-2),
    )
    train_twins(ours, plain, optimizers, 10)


@pytest.mark.ranks(2)
def test_an_inner_module_first() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    ours.blocks[0].unshard()
    for whole, theirs in zip(ours.blocks[0].parameters(), plain.blocks[0].parameters()):
        assert torch.equal(whole, theirs)
    ours.blocks[0].reshard()
    optimizers = (
        torch.optim.Adam(ours.parameters(), lr=1e-2),
        torch.optim.Adam(plain.parameters(), lr=1e-2),
    )
    train_twins(ours, plain, optimizers, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["fused", "foreach", "ours"])
def test_optimizers_and_clipping(kind: str) -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    theirs = torch.optim.AdamW(plain.parameters(), **options)
    if kind == "ours":
        mine: Any = fsdpc.torch.optim.AdamW(ours.parameters(), **options)
        clip = lambda ps, m: (  # noqa: E731
            fsdpc.torch.clip_grad_norm_(ps, m)
        )
    else:
        mine = torch.optim.AdamW(ours.parameters(), **options, **{kind: True})
        clip = torch.nn.utils.clip_grad_norm_
    train_twins(ours, plain, (mine, theirs), 10, fn=clip, max_norm=0.05)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("changed", ["none", "one", "one dropped"])
def test_a_step_applies_the_factor_of_clipping_while_it_reads(changed: str) -> None:
    """Gradients are scaled by a pass of its own only where somebody has changed one since."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = (fsdpc.torch.optim.SGD(ours.parameters(), **options),
                  torch.optim.SGD(plain.parameters(), **options))
    both(ours, plain)
    fsdpc.torch.clip_grad_norm_(ours, 1e-2)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    first, theirs = ours.blocks[0].linear.weight, plain.blocks[0].linear.weight
    if changed == "one":
        first.grad, theirs.grad = torch.ones_like(first), torch.ones_like(theirs)
    if changed == "one dropped":
        first.grad, theirs.grad = None, None
    for optimizer in optimizers:
        optimizer.step()
    units = {p.fsdpc._state.torch_unit for p in ours.parameters()}
    pending = {"none": len(units), "one": 0, "one dropped": len(units) - 1}
    assert sum(unit.has_factor for unit in units) == pending[changed]
    assert_same_parameters(ours, plain)
    if changed == "none":
        assert_same_grads(ours, plain)  # scaled for whoever looks
        assert not any(unit.has_factor for unit in units)


@pytest.mark.ranks(2)
def test_norms_are_global() -> None:
    ours = shard(build())
    plain = build()
    x = torch.cat([batch(0, 0), batch(0, 1)])
    loss_of(plain, x).backward()
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    for order in (1.0, 2.0, float("inf")):
        expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
        found = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()], order)
        torch.testing.assert_close(full(found), expected, rtol=1e-5, atol=0)
        assert torch.equal(found.to_local(), full(found))  # exact on every rank
        squares = [p.grad.data.norm(2).item() ** 2 for p in ours.parameters()]
        true = [p.grad.data.norm(2).item() ** 2 for p in plain.parameters()]
        assert squares == pytest.approx(true, rel=1e-4)
    mine = fsdpc.torch.clip_grad_norm_(ours, 1e-3)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(full(mine), expected, rtol=1e-5, atol=0)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-9)
        begin, end = p.fsdpc.rows
        rows = (p.grad + 0).to_local()
        torch.testing.assert_close(rows, q.grad[begin:end], rtol=1e-4, atol=1e-9)


@pytest.mark.ranks(2)
def test_strategies_agree_to_the_bit() -> None:
    results = []
    for reshard in (True, False):
        model = shard(build(), reshard_after_forward=reshard)
        optimizer = fsdpc.torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(step, fsdpc.rank())).backward()
            optimizer.step()
        results.append(full_parameters(model))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.ranks(2)
def test_ranks_have_rows() -> None:
    model = build()
    plain = twin(model)
    names = [n for n, _ in model.named_parameters()]
    ours = shard(model)
    assert type(ours).__name__ == "FSDPNet"
    assert [n for n, _ in ours.named_parameters()] == names
    for name, p in ours.named_parameters():
        q = plain.get_parameter(name)
        assert isinstance(p, torch.nn.Parameter) and p.dim() == q.dim()
        assert type(p) in _foreach_supported_types
        assert isinstance(p, DTensor) and p.placements == (Shard(0),)
        assert p.fsdpc.shape == p.shape == q.shape
        begin, end = p.fsdpc.rows
        assert torch.equal(p.to_local(), q[begin:end])
        assert torch.equal(p.to_local(), q.chunk(2)[fsdpc.rank()])
        assert torch.equal(p.full_tensor(), q)
    assert_same_parameters(ours, plain, rtol=0, atol=0)


@pytest.mark.ranks(1)
def test_one_rank_has_no_collectives() -> None:
    ours = shard(build())
    optimizer = torch.optim.Adam(ours.parameters())
    for step in range(3):
        loss_of(ours, batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = event_counts()
    assert counts["forward"] == 12
    assert not any(counts[k] for k in ("gather", "reduce", "collective")), counts


@pytest.mark.ranks(2)
def test_accumulation_over_backwards() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    for micro in range(3):
        loss_of(ours, batch(0, fsdpc.rank(), micro)).backward()
        for rank in range(2):
            (loss_of(plain, batch(0, rank, micro)) / 2).backward()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, plain)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(ours, plain)


@pytest.mark.ranks(2)
def test_different_models_are_named() -> None:
    torch.manual_seed(fsdpc.rank())
    with pytest.raises(fsdpc.MismatchError, match=r"rank 0 has \[weight \(3, 5\)"):
        fully_shard(torch.nn.Linear(5, 3))


@pytest.mark.ranks(2)
def test_rank_0_is_taken_on_request() -> None:
    torch.manual_seed(fsdpc.rank())
    layer = torch.nn.Linear(5, 3)
    ours = fully_shard(layer, sync_module_states=True)
    torch.manual_seed(0)
    assert_same_parameters(ours, torch.nn.Linear(5, 3), rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_a_list_is_one_unit() -> None:
    model = build()
    plain = twin(model)
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.first, model.last])
    ours: Any = fully_shard(model)
    assert ours.first._fsdpc_unit is ours.last._fsdpc_unit
    assert_same_steps(ours, plain)


@pytest.mark.ranks(2)
def test_structured_outputs_and_views() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 6)

        def forward(self, x: torch.Tensor, scale: Any = None) -> Any:
            y = self.linear(x)
            return {"out": (y[:, :3], [y[:, 3:]]), "n": 3, "text": "t", "x": scale["s"] * 2}

    torch.manual_seed(0)
    plain = Odd()
    ours = fully_shard(twin(plain))
    for m in (ours, plain):
        x = batch(0, fsdpc.rank()).requires_grad_()
        out = m(x, scale={"s": x.mean() * 3})
        a, (b,) = out["out"]
        a += 1.0
        (a.sum() * b.sum() + out["x"]).backward()
        m.input_grad = x.grad
    average_grads(plain)
    assert_same_grads(ours, plain)
    torch.testing.assert_close(ours.input_grad, plain.input_grad)


@pytest.mark.ranks(2)
def test_a_plan_hands_the_strategy_on() -> None:
    model = fully_shard(build(), plan={"blocks.*": {}}, strategy="SHARD_OPTIM")
    assert model._fsdpc_unit.keep_grads
    assert all(block._fsdpc_unit.keep_grads for block in model.blocks)


class Normed(nn.Sequential):
    """Normalisations of every kind, with buffers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(7, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)
        )


@pytest.mark.ranks(2)
def test_norm_modules() -> None:
    torch.manual_seed(0)
    plain = Normed()
    ours: Any = twin(plain)
    for m in ours:
        fully_shard(m)
    fully_shard(ours)
    assert_same_steps(ours, plain)
    for name, buffer in plain.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(batch(0, 0)), plain(batch(0, 0)))
