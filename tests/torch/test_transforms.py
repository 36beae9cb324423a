"""``torch.func`` and ``torch.export`` over sharded modules, and over plain ones inside of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fsdpc
from fsdpc.torch import summon_full_params

from .common import Net, batch, build, full_parameters, shard, train_twins, twin

Values = dict[str, torch.Tensor]


def trained() -> tuple[Any, nn.Module, Any]:
    """A sharded model, its twin, and how to train both."""
    model = build()
    plain = twin(model)
    ours = shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]

    def train() -> None:
        train_twins(ours, plain, optimizers, 2)

    train()
    return ours, plain, train


def exported(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the exported program computes."""
    return torch.export.export(model, (x,)).module()(x)


def gradient(model: nn.Module, values: Values, x: torch.Tensor) -> Values:
    """Of a loss over a model's values."""
    return grad(lambda v: functional_call(model, v, (x,)).pow(2).sum())(values)


REFUSED: dict[str, tuple[str, Callable[[Any, Values, torch.Tensor], Any]]] = {
    "functional_call": ("functional_call", lambda m, v, x: functional_call(m, v, (x,))),
    "some values": (
        "functional_call",
        lambda m, v, x: functional_call(m, {"last.weight": v["last.weight"]}, (x,)),
    ),
    "unit": (
        "functional_call",
        lambda m, v, x: functional_call(
            m.blocks[1], {"norm.bias": v["blocks.1.norm.bias"]}, (torch.ones(2, 20),)
        ),
    ),
    "grad": ("torch.func.grad", lambda m, v, x: grad(lambda x: m(x).sum())(x)),
    "grad of values": ("torch.func.grad", gradient),
    "vjp": ("torch.func.grad .or vjp", lambda m, v, x: vjp(m, x)),
    "jacrev": ("torch.func.grad .*jacrev", lambda m, v, x: jacrev(m)(x)),
    "hessian": ("torch.func", lambda m, v, x: hessian(lambda x: m(x).sum())(x)),
    "vmap": ("torch.func.vmap", lambda m, v, x: vmap(m)(x)),
    "jvp": ("torch.func.jvp", lambda m, v, x: jvp(m, (x,), (x,))),
    "jacfwd": ("torch.func.* .or jacfwd", lambda m, v, x: jacfwd(m)(x)),
    "export": ("torch.export", lambda m, v, x: exported(m, x)),
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_unit_sees_is_named(what: str) -> None:
    """Training goes on as before."""
    named, call = REFUSED[what]
    ours, plain, train = trained()
    unsharded = full_parameters(ours)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{named}.*\\s.*copy made before fully_shard"):
            call(ours, unsharded, batch(0, fsdpc.rank()))
    train()


@pytest.mark.ranks([1, 2])
def test_functional_call_with_the_own_parameters() -> None:
    ours, plain, train = trained()
    x = batch(0, fsdpc.rank())
    y = functional_call(ours, dict(ours.named_parameters()), (x,))
    torch.testing.assert_close(y, plain(x))
    train()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("what", ["vmap", "jvp", "jacfwd"])
def test_transforms_without_gradients(what: str) -> None:
    ours, plain, train = trained()
    x = batch(0, fsdpc.rank())
    call = REFUSED[what][1]
    with torch.no_grad():
        torch.testing.assert_close(call(ours, {}, x), call(plain, {}, x))
    train()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("what", ["functional_call", "some values", "vmap", "export"])
def test_inside_summon_full_params(what: str) -> None:
    ours, plain, train = trained()
    values = {name: 2 * value for name, value in full_parameters(ours).items()}
    x = batch(0, fsdpc.rank())
    call = REFUSED[what][1]
    with torch.no_grad(), summon_full_params(ours):
        y = call(ours, values, x)
    torch.testing.assert_close(y, call(plain, values, x))
    train()


def _per_sample(layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
    def loss(values: Values, row: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, values, (row,)).pow(2).mean()

    return vmap(grad(loss), in_dims=(None, 0))(dict(layer.named_parameters()), h)["weight"]


INSIDE: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "functional_call": lambda m, h: functional_call(m, {"weight": 2 * m.weight}, (h,)),
    "grad": lambda m, h: grad(lambda v: m(v).pow(2).sum())(h),
    "gradients of each sample": _per_sample,
    "jacrev": lambda m, h: jacrev(m)(h),
    "jacobian of values": lambda m, h: jacrev(
        lambda w: functional_call(m, {"weight": w}, (h,)).tanh()
    )(m.weight),
    "hessian": lambda m, h: hessian(lambda v: m(v).pow(3).sum())(h[0]),
    "vmap": lambda m, h: vmap(m)(h),
    "jvp": lambda m, h: jvp(m, (h,), (h,))[1],
    "export": lambda m, h: exported(m, h),
}


class Transforms(Net):
    """Transforms one of its layers in forward."""

    inside = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = INSIDE[self.inside](self.last, torch.linspace(0, 1, 60).view(3, 20))
        return super().forward(x) + found.tanh().mean()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("inside", INSIDE)
def test_inside_of_a_unit(inside: str) -> None:
    """Plain layers may be transformed there, with gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Transforms()
    model.inside = inside
    plain = twin(model)
    ours = shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    train_twins(ours, plain, optimizers, 3)
