"""Norms of sharded gradients: whole, exact, current, and few collectives for many of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdpc
from fsdpc import _core
from tests.events import event_counts

from .common import (
    assert_same_grads,
    assert_same_parameters,
    assert_same_steps,
    batch,
    both,
    build,
    full,
    loss_of,
    shard,
    twin,
)


def norms_of(parameters: Any) -> list[torch.Tensor]:
    """From the full gradients, in float64, rounded once."""
    return [p.grad.full_tensor().double().norm().to(p.dtype) for p in parameters]


def collectives(action: Any) -> int:
    _core.trace_reset()
    action()
    return event_counts()["collective"]


@pytest.mark.ranks([1, 2, 3])
def test_norms_follow_every_change() -> None:
    ours = shard(build())
    params = list(ours.parameters())

    def check() -> None:
        expected = norms_of(params)
        for p, norm in zip(params, expected):
            assert torch.equal(full(p.grad.norm()), norm)
            assert torch.equal(full(p.grad.data.norm(2)), norm)
        norms = torch._foreach_norm([p.grad for p in params], 2.0)
        assert all(map(torch.equal, map(full, norms), expected))

    for step in range(2):
        loss_of(ours, batch(step, fsdpc.rank())).backward()
        check()
    params[0].grad.mul_(3)
    check()
    params[1].grad.data.mul_(5)
    check()
    params[2].grad = params[2].grad.clone().mul_(7)
    check()
    params[0].grad.norm().zero_()  # what was returned is the caller's
    check()
    fsdpc.torch.clip_grad_norm_(params, 1e-3)
    check()
    for write in (
        lambda g: g[:, 0].fill_(1.0),
        lambda g: g.__setitem__(slice(None), 2.0),
        lambda g: g.view_as(g).mul_(2),
        lambda g: g.detach().to_local().mul_(2),
        lambda g: torch._foreach_mul_([g, g.detach()], 2.0),
    ):
        write(params[0].grad)
        check()
    params[-1].grad = torch.ones_like(params[-1])
    check()
    copies = [p.grad.clone() for p in params]  # also of ranks without rows
    expected = norms_of(params)
    for p in params:
        p.grad.zero_()
    assert all(map(torch.equal, [full(copy.norm()) for copy in copies], expected))


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_a_norm_and_clipping_are_one_computation(order: float) -> None:
    torch.manual_seed(0)
    layer = fsdpc.torch.fully_shard(nn.Linear(257, 33, bias=False))
    torch.manual_seed(1 + fsdpc.rank())
    layer(torch.randn(4, 257)).square().sum().backward()
    norm = layer.weight.grad.norm(order)
    for clip in (fsdpc.torch.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        assert torch.equal(clip(layer.parameters(), float("inf"), order), norm)


class Watching(TorchDispatchMode):
    """As counters of FLOPs and of collectives are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.ranks(2)
def test_writes_to_lists_count_in_a_mode(dtype: torch.dtype) -> None:
    """There torch does not count them in the tensors' versions."""
    ours = shard(build().to(dtype))
    params = list(ours.parameters())
    model_input = batch(0, fsdpc.rank()).to(dtype)
    loss_of(ours, model_input).backward()
    before = [p.grad.full_tensor() for p in params]
    norm = params[0].grad.norm()
    with Watching():
        torch._foreach_mul_([p.grad for p in params], 0.5)
        assert torch.equal(params[0].grad.norm(), norm / 2)
    for p, grad in zip(params, before, strict=True):
        assert torch.equal(p.grad.full_tensor(), grad / 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["/", "mul", "where", "foreach", "momentum"])
def test_arithmetic_on_gradients_gives_gradients(how: str) -> None:
    """Clipping after ``p.grad = p.grad / n`` takes norms of the whole, alike on all ranks."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)

    def changed(grad: torch.Tensor) -> torch.Tensor:
        if how == "/":
            return grad / 3
        if how == "mul":
            return torch.mul(0.5 * grad - 0.01, 2).clamp(-1, 1)
        if how == "where":
            return torch.where(grad > 0.01, grad, 0 * grad)
        if how == "foreach":
            return torch._foreach_mul([grad], 2.0)[0]
        return torch.zeros_like(grad).mul(0.9).add(grad, alpha=0.1)

    for model in (ours, plain):
        for p in model.parameters():
            p.grad = changed(p.grad)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (ours, plain)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    assert_same_grads(ours, plain)
    ours.blocks[0].norm.bias.grad = ours.blocks[0].norm.bias.grad * 2
    plain.blocks[0].norm.bias.grad *= 2
    assert_same_grads(ours, plain)


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("how", ["sign", "flat", "zeros", "distributed", "rows"])
def test_what_is_assigned_to_grad_is_rows_of_a_gradient(how: str, foreach: bool | None) -> None:
    """Ranks clip by one factor then, that of the whole; also where only some were assigned."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    both(ours, plain)

    def changed(grad: torch.Tensor) -> torch.Tensor:
        if how == "sign":
            return torch.sign(grad)
        if how == "flat":  # as gradient surgery does
            return torch.cat([grad.flatten(), grad.flatten()])[: grad.numel()].view(grad.shape)
        if how == "zeros":
            return torch.zeros_like(grad).lerp(grad, 0.5)
        if not isinstance(grad, DTensor):
            return grad.clone()
        mesh, placements = grad.device_mesh, grad.placements
        if how == "distributed":
            return distribute_tensor(grad.full_tensor(), mesh, placements)
        rows, shape, stride = grad.to_local().clone(), grad.shape, grad.stride()
        return DTensor.from_local(rows, mesh, placements, shape=shape, stride=stride)

    for net in (ours, plain):
        for p in list(net.parameters())[:-1]:
            new = changed(p.grad)
            p.grad = new
            new.mul_(2)  # the same memory
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    total = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()], foreach=foreach)
    norms = [
        nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=foreach) for m in (ours, plain)
    ]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    assert torch.equal(total, norms[0])
    assert_same_grads(ours, plain)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(ours, plain)
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert all(p.grad is None for p in ours.parameters())
    assert_same_steps(ours, plain)


@pytest.mark.ranks(2)
def test_grads_of_another_shape_or_type_are_refused() -> None:
    ours = shard(build())
    p = ours.first.weight
    with pytest.raises(RuntimeError, match="same size"):
        p.grad = torch.zeros(p.to_local().shape)
    with pytest.raises(RuntimeError, match="dtype"):
        p.grad = torch.zeros(p.shape, dtype=torch.float64)
    with pytest.raises(TypeError):
        p.grad = 0.5
    p.grad = torch.ones(p.shape)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor.* 'Net.first.weight'"):
        fsdpc.torch.optim.SGD(ours.parameters(), lr=0.1).step()
    del p.grad
    assert p.grad is None
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    assert type(p.grad.full_tensor()) is torch.Tensor


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layers", [10, 40])
def test_collectives_do_not_grow_with_parameters(layers: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(7, 7) for _ in range(layers)])
    for layer in model:
        fsdpc.torch.fully_shard(layer)
    fsdpc.torch.fully_shard(model)
    params = list(model.parameters())
    loss_of(model, batch(0, fsdpc.rank())).backward()
    clip = torch.nn.utils.clip_grad_norm_
    assert collectives(lambda: clip(params, 1e-3)) == 1
    assert collectives(lambda: [p.grad.norm() for p in params]) == 1
    assert collectives(lambda: clip(params, 1e-4, foreach=False)) == 0  # known since
    assert collectives(lambda: torch.nn.utils.clip_grad_value_(params, 1e-5)) == 0

    def change() -> None:
        for p in params:
            p.grad.norm()
            p.grad.mul_(2)
            p.grad.norm()

    assert collectives(change) <= len(params) + 3
    if fsdpc.rank() == 0:  # what is known is no collective, and changes nothing for the others
        assert collectives(lambda: [p.grad.norm() for p in params]) == 0
    for p in params:
        p.grad.mul_(2)
    assert collectives(lambda: [p.grad.norm() for p in params]) <= 2 + len(params) / 8


@pytest.mark.ranks([1, 2, 3])
def test_norms_by_hand() -> None:
    """Sums over sharded rows are sums over the whole, also as numbers and in further arithmetic."""
    ours = shard(build())
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    for p in ours.parameters():
        grad, whole = p.grad, p.grad.full_tensor()
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
        for of in (
            lambda g: (g * g).sum().sqrt(),
            lambda g: g.abs().max() + 1,
            lambda g: g.abs().mean().log(),
            lambda g: g.sum(0).abs(),
            lambda g: (g - g.mean()).square().sum(),
            lambda g: torch._foreach_add([g.sum()], 1.0)[0],
        ):
            close(full(of(grad)), of(whole))
        close(grad.pow(2).sum().item() ** 0.5, whole.norm().item())
        close(float(grad.abs().max()), float(whole.abs().max()))
        assert grad.abs().max().item() == whole.abs().max().item()
        assert int((grad > 0).sum()) == int((whole > 0).sum())
        assert bool((grad == whole.max()).any()) and not bool((grad < whole.max()).all())
        other = grad.clone()
        if fsdpc.rank() == 0:
            other.to_local().add_(1)
        assert torch.equal(grad, grad.clone()) and not torch.equal(grad, other)


@pytest.mark.ranks(2)
def test_an_order_that_is_none() -> None:
    ours = shard(build())
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    with pytest.raises(ValueError, match="-1"):
        next(ours.parameters()).grad.norm(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.ranks(2)
def test_full_gradients_are_taken_one_at_a_time(dtype: torch.dtype) -> None:
    """Each as it is then, whatever became of the others; what clipping left counts."""
    ours = shard(build().to(dtype))
    params = list(ours.parameters())
    loss_of(ours, batch(0, fsdpc.rank()).to(dtype)).backward()
    expected = [p.grad.full_tensor().mul_(0.5) for p in params]
    fsdpc.torch.clip_grad_norm_(params, 0.5 * float(fsdpc.torch.clip_grad_norm_(params, 1e30)))
    for k, p in enumerate(params):
        if k % 3 == 0:
            p.grad = p.grad.clone().mul_(4)
            expected[k].mul_(4)
        elif k % 3 == 1:
            p.grad.mul_(2)
            expected[k].mul_(2)
    for p, grad in reversed(list(zip(params, expected, strict=True))):
        torch.testing.assert_close(p.grad.full_tensor(), grad, atol=0, rtol=1e-2)


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.ranks(2)
def test_the_total_norm_has_a_full_value(foreach: bool | None) -> None:
    """As FSDP2's, which is a DTensor: loops for it ask its full_tensor()."""
    ours = shard(build())
    params = list(ours.parameters())
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    expected = torch.stack(norms_of(params)).norm()
    for clip in (torch.nn.utils.clip_grad_norm_, fsdpc.torch.clip_grad_norm_):
        total = clip(params, 1e30, foreach=foreach)
        assert type(total.full_tensor()) is torch.Tensor
        torch.testing.assert_close(total.full_tensor(), expected)
        assert float(total) == total.item() == float(total.full_tensor())
    assert torch.equal(params[0].grad._local_tensor, params[0].grad.to_local())


@pytest.mark.ranks(1)
def test_the_norm_of_a_float64_model_is_float64() -> None:
    ours = shard(build().double())
    (1e100 * loss_of(ours, batch(0, 0).double())).backward()
    norm = fsdpc.torch.clip_grad_norm_(ours.parameters(), 1.0)
    assert norm.dtype is torch.float64 and 1e50 < norm < 1e150
