"""Dtypes of sharded models: converted after sharding, or wider masters than what computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard, optim, set_model_state_dict

from .common import (
    ATOL,
    RTOL,
    Net,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    full_parameters,
    loss_of,
    shard,
    train_twins,
    twin,
)


def train(model: Any, optimizer: Any, dtype: torch.dtype, steps: int = 5) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, fsdpc.rank()).to(dtype))
        loss.backward()
        if not hasattr(model, "_fsdpc_unit"):
            average_grads(model)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_to_after_sharding(kind: str, dtype: torch.dtype) -> None:
    model = build()
    plain: Any = twin(model).to(dtype)
    ours = shard(model)
    sharded = list(ours.parameters())
    assert ours.to(dtype) is ours
    for own, p in zip(sharded, ours.parameters(), strict=True):
        assert p is own and p.dtype is dtype and p.full_tensor().dtype is dtype
    assert_same_parameters(ours, plain, rtol=0, atol=0)
    make = optim.AdamW if kind == "ours" else torch.optim.AdamW
    losses = [
        train(m, make(m.parameters(), lr=1e-2), dtype)
        for m, make in ((ours, make), (plain, torch.optim.AdamW))
    ]
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {}
    tolerance = tolerance or {"rtol": 3e-2, "atol": 3e-2}  # bf16: roundings of gradients
    torch.testing.assert_close(losses[0], losses[1], **tolerance)
    assert_same_parameters(ours, plain, **tolerance)


class Mixed(nn.Module):
    """Parameters in two dtypes, which are two flat groups and become one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 9, dtype=torch.bfloat16)
        self.b = nn.Linear(9, 9)
        self.register_buffer("count", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x.to(self.a.weight.dtype)).to(self.b.weight.dtype))


@pytest.mark.ranks(2)
def test_the_layout_follows() -> None:
    torch.manual_seed(0)
    model = Mixed()
    plain = twin(model).double()
    ours: Any = fully_shard(model)
    ours.set_gradient_divide_factor(1.0)
    ours.set_requires_gradient_sync(False)
    groups = {fsdpc._core.unit_places(ours._fsdpc_unit)[i][0] for i in range(4)}
    assert len(groups) == 2
    ours.double()
    groups = {fsdpc._core.unit_places(ours._fsdpc_unit)[i][0] for i in range(4)}
    assert len(groups) == 1
    for p in ours.parameters():  # rows are cut as torch.chunk cuts them, in one group as in two
        begin, end = p.fsdpc.rows
        rows = [len(r) for r in torch.empty(len(p)).chunk(2)][fsdpc.rank()]
        assert p.to_local().shape == (rows, *p.shape[1:]) and end - begin == rows
    assert ours.count.dtype is torch.float64
    assert_same_parameters(ours, plain, rtol=0, atol=0)
    x = batch(0, fsdpc.rank()).double()
    loss_of(ours, x).backward()
    assert ours.b.weight.grad is None  # what was set before still holds
    ours.set_requires_gradient_sync(True)
    loss_of(ours, x).backward()
    for _ in range(2):
        loss_of(plain, x).backward()
    average_grads(plain)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(fsdpc.torch.full_grad(p), 2 * q.grad)


@pytest.mark.ranks(2)
def test_when_dtypes_can_no_longer_change() -> None:
    ours = shard(build())
    early = optim.SGD(ours.blocks[0].parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"of unit 'Block' cannot change under SGD.*after"):
        ours.double()
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    del early
    with pytest.raises(NotImplementedError, match="would go to meta: it lives where the engine"):
        ours.to("meta")
    ours.blocks[1].double()
    ours.blocks[1].float()
    loss_of(ours, batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match="of unit 'Net' cannot change after its first forward"):
        ours.to(torch.float64)
    ours.float()
    ours.to("cpu")
    loss_of(ours, batch(0, 0)).backward()


@pytest.mark.ranks(2)
def test_data_replaced_before_a_conversion_counts() -> None:
    ours = shard(build())
    for p in ours.parameters():
        p.data = torch.full_like(p, 2.0)
    ours.double()
    for value in full_parameters(ours).values():
        assert (value == 2).all()


@pytest.mark.ranks(2)
def test_meta_models_convert_too() -> None:
    with torch.device("meta"):
        model: Any = Net()
    ours = shard(model)
    ours.double()
    with pytest.raises(RuntimeError, match="has no values yet"):
        ours(batch(0, 0).double())
    ours.load_state_dict(build().double().state_dict())
    assert_same_parameters(ours, build().double(), rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_fp32_masters_of_a_bf16_model() -> None:
    """As a model that is fp32 and computes in bf16, from the same values."""
    narrow: Any = build().bfloat16()
    reference: Any = twin(narrow).float()
    ours = shard(narrow, master_dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard(reference, mp_policy=policy)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    seen = []
    ours.first.register_forward_pre_hook(lambda m, i: seen.append(m.weight.dtype))
    losses = [
        train(m, optim.AdamW(m.parameters(), lr=1e-4), torch.bfloat16) for m in (ours, reference)
    ]
    assert seen == [torch.bfloat16] * 5
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    for name, value in full_parameters(reference).items():
        assert torch.equal(value, full_parameters(ours)[name]), name
        assert not torch.equal(value, value.bfloat16().float()) or "bias" in name, name


@pytest.mark.ranks(1)
def test_masters_of_mixed_models() -> None:
    with pytest.raises(ValueError, match=r"'torch.bfloat16', 'torch.float32'.*param_dtype"):
        fully_shard(Mixed(), master_dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ours = fully_shard(Mixed(), master_dtype=torch.float32, mp_policy=policy)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert ours(batch(0, 0)).dtype is torch.bfloat16
    wide = fully_shard(build(), master_dtype=torch.float32)
    assert wide._fsdpc_unit.param_dtype is None


@pytest.mark.ranks(2)
def test_ten_steps_after_double_and_back() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model).double().float()
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ours, plain)]
    train_twins(ours, plain, optimizers, 10)
    assert_same_parameters(ours, plain, rtol=RTOL, atol=ATOL)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("by", ["to_empty", "load_state_dict", "rank 0", "reset_parameters"])
def test_parameters_say_meta_until_they_have_memory(by: str) -> None:
    plain = build()
    values = plain.state_dict()
    with torch.device("meta"):
        model = build()
    ours = shard(model)
    sharded = list(ours.parameters())

    def check(device: str, params: list[Any] = sharded) -> None:
        for p in params:
            assert p.device == torch.device(device) and p.is_meta == (device == "meta")
            assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)

    check("meta")
    assert "device='meta'" in f"{ours.last.weight!r}"
    optimizer = torch.optim.AdamW(sharded, lr=0.1)
    ours.double().float()
    check("meta")
    with pytest.raises(NotImplementedError, match="to_empty"):
        ours.to("cpu")
    check("meta")
    if by == "to_empty":
        ours.blocks[1].to_empty(device="cpu")
        check("cpu", list(ours.blocks[1].parameters()))
        check("meta", list(ours.blocks[0].parameters()))
        ours.to_empty(device="cpu")
        check("cpu")
        with pytest.raises(RuntimeError, match="was on the meta device and has no values"):
            ours(batch(0, 0))
    elif by == "reset_parameters":
        ours.last.reset_parameters()
        check("cpu", [ours.last.weight])
        check("meta", [ours.first.weight])
    if by == "rank 0":
        set_model_state_dict(ours, values if fsdpc.rank() == 0 else {}, rank0_only=True)
    else:
        ours.load_state_dict(values)
    check("cpu")
    assert all(a is b for a, b in zip(ours.parameters(), sharded, strict=True))
    assert len({type(p) for p in [*sharded, *fully_shard(nn.Linear(2, 2)).parameters()]}) == 1
    train_twins(ours, plain, (optimizer, torch.optim.AdamW(plain.parameters(), lr=0.1)), 2)
