"""A forward that reads or writes a parameter of a unit that does not run, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import fully_shard, register_fsdp_forward_method

from .common import (
    assert_same_grads,
    assert_same_parameters,
    average_grads,
    batch,
    build,
    full,
    loss_of,
    shard,
    twin,
)

# ---- another unit's parameter in a forward ----


class Product(torch.autograd.Function):
    """A loss that is fused, say."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise AssertionError("forward went through")


def without_grad(hidden: Any, weight: Any) -> Any:
    with torch.no_grad():
        return hidden @ weight.mT


READS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": F.linear,
    "transposed": lambda h, w: h @ w.T,
    "broadcast": lambda h, w: (h[..., None, :] * w).sum(-1),
    "data": lambda h, w: h @ w.data.t(),
    "detached": lambda h, w: F.linear(h, w.detach()),
    "cast": lambda h, w: F.linear(h.double(), w.double()),
    "no_grad": without_grad,
    "function": Product.apply,
    "aten": torch.ops.aten.linear,
    "vmap": lambda h, w: torch.vmap(lambda row: h @ row)(w),
    "func": lambda h, w: torch.func.grad(lambda x: (x @ w.T).sum())(h),
    "checkpoint": lambda h, w: checkpoint(F.linear, h, w, use_reentrant=False),
    "reentrant": lambda h, w: checkpoint(F.linear, h, w, use_reentrant=True),
    "some rows": lambda h, w: F.linear(h, w[:3]),
    "a product of its own": lambda h, w: h @ (w.T @ w),
    "in place": lambda h, w: h.detach().mul_(w[0]),
}
#: Reads that torch's DTensor refuses.
OUTSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "numpy": lambda h, w: h.detach().numpy() @ w.detach().numpy().T,
}
#: Without plain tensors: a DTensor's answers.
ANSWERS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda h, w: w[:3].square().sum(),
    "norm": lambda h, w: w.norm(),
    "norm of data": lambda h, w: w.data.norm(),
    "sum": lambda h, w: w.sum(),
    "mean": lambda h, w: (w**2).mean().sqrt(),
    "product": lambda h, w: (w.T @ w).tanh().sum(),
}


class Tied(nn.Module):
    """Logits by the embedding's weight, as some heads and trainers compute them."""

    def __init__(self, read: Callable[[Any, Any], Any] = F.linear) -> None:
        super().__init__()
        self.e = nn.Embedding(12, 4)
        self.read = read

    def forward(self, i: torch.Tensor) -> Any:
        return self.read(self.e(i).tanh(), self.e.weight)


def tied(read: Callable[[Any, Any], Any]) -> Any:
    """The model, with its embedding as a unit of its own."""
    torch.manual_seed(0)
    model = Tied(read)
    fully_shard(model.e)
    return fully_shard(model)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("read", sorted(READS))
def test_a_forward_does_not_read_rows_of_another_unit(read: str) -> None:
    model = tied(READS[read])
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"in the forward of FSDPTied got mixed torch.Tensor and DTensor: unit 'e' does "
            r"not run there, and this rank has rows .* of .*e.weight' \(12, 4\) only. Do not shard "
            r"'e' by itself.*register_fsdp_forward_method",
        ):
            model(torch.arange(6))
    model.read = lambda h, w: h.to(w.dtype) @ torch.ones(w.shape[1], 1, device=w.device)
    model(torch.arange(6)).sum().backward()  # types and the like may be asked for
    assert model.e.weight.grad.norm() > 0


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("read", sorted(OUTSIDE))
def test_nor_what_torch_does_not_compute(read: str) -> None:
    model = tied(OUTSIDE[read])
    with pytest.raises(RuntimeError, match=r"rows .* of .*e.weight' \(12, 4\)|numpy\(\) is not"):
        model(torch.arange(6))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("read", sorted(ANSWERS))
def test_a_forward_reads_dtensors_of_another_unit(read: str, again: bool) -> None:
    """A penalty inside of forward: value and gradients are the plain model's."""

    def penalised(h: Any, w: Any) -> Any:
        term = ANSWERS[read](h, w)
        return h.square().sum() + (term.full_tensor() if isinstance(term, DTensor) else term)

    torch.manual_seed(0)
    ours: Any = Tied(penalised)
    plain = copy.deepcopy(ours)
    fully_shard(ours.e)
    fully_shard(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
    if again and read not in ("norm of data", "sum"):  # it would read an unsharded parameter
        loss = checkpoint(ours, torch.arange(6), use_reentrant=False)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor|recomputed"):
            loss.backward()
        ours.reset_iter_state()
        return
    for _ in range(2):
        losses = []
        for model in (ours, plain):
            i = torch.arange(6) + fsdpc.rank()
            loss = model(i)
            loss.backward()
            losses.append(loss.detach())
            if model is plain:
                average_grads(plain)
        torch.testing.assert_close(*losses)
        assert_same_grads(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, plain)


@pytest.mark.ranks(2)
def test_nor_of_another_model() -> None:
    torch.manual_seed(0)
    teacher = fully_shard(nn.Linear(4, 4, bias=False))
    model = Tied(lambda h, w: F.linear(h, teacher.weight))
    fully_shard(model)
    with pytest.raises(RuntimeError, match="forward of FSDPTied got mixed .*: unit 'Linear'"):
        model(torch.arange(6))


class Reader(nn.Embedding):
    """An embedding that makes the logits itself."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = Reader(12, 4)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.e.logits(self.e(i).tanh())


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("cure", ["one unit", "a method"])
def test_what_the_error_advises_is_right(cure: str, again: bool) -> None:
    torch.manual_seed(0)
    ours: Any = Tied() if cure == "one unit" else Asking()
    plain = copy.deepcopy(ours)
    if cure == "a method":
        fully_shard(ours.e)
        register_fsdp_forward_method(ours.e, "logits")
    fully_shard(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, plain)]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + fsdpc.rank())
        i = torch.randint(0, 12, (2, 3), generator=generator)
        for model in (ours, plain):
            out = checkpoint(model, i, use_reentrant=False) if again else model(i)
            out.square().sum().backward()
        average_grads(plain)
        assert_same_grads(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, plain)


class Contrast(nn.Module):
    """A second encoder that follows the first, in forward."""

    def __init__(self, follow: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(7, 5), nn.Linear(7, 5)
        self.follow = follow

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            self.follow(k, q)
        return self.query(x) - self.key(x)


def assign(k: Any, q: Any) -> None:
    k.data = torch.zeros(k.shape)


FOLLOW: dict[str, Callable[[Any, Any], None]] = {
    "in place": lambda k, q: k.mul_(0.9),
    "data": lambda k, q: k.data.lerp_(q.data, 0.1),
    "detached": lambda k, q: k.detach().copy_(q),
    "a view": lambda k, q: k[..., :2].zero_(),
    "foreach": lambda k, q: torch._foreach_mul_([k.data], 0.9),
    "drawn": lambda k, q: k.normal_(),
    "assigned": assign,
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("how", sorted(FOLLOW))
def test_a_forward_does_not_write_rows(how: str) -> None:
    """They are gathered when the outermost forward begins, so it would not see them."""
    torch.manual_seed(0)
    ours = Contrast(FOLLOW[how])
    before = ours.key.weight.detach().clone()
    for part in (ours.query, ours.key, ours):
        fully_shard(part)
    with pytest.raises(RuntimeError, match="rows .* of 'key.weight' .* in the forward of FSDPCont"):
        ours(batch(0, fsdpc.rank()))
    assert torch.equal(full(ours.key.weight), before)


class Mixed(nn.Module):
    """Methods of the root that nobody made a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.head = nn.Parameter(torch.ones(7, 7))
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.head * self.scale

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.head

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(self.inner(x), (7,), self.scale)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).addcmul(x, self.scale)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("method", ["product", "scaled", "normed", "joined"])
def test_a_method_that_mixes_units_is_named(method: str) -> None:
    """Unless it is registered."""
    torch.manual_seed(0)
    plain = Mixed()
    ours: Any = copy.deepcopy(plain)
    fully_shard(ours.inner)
    fully_shard(ours)
    x = batch(0, fsdpc.rank())
    with pytest.raises(RuntimeError, match="rows .* of 'Mixed.*register_fsdp_forward_method"):
        getattr(ours, method)(x)
    ours.reset_iter_state()
    register_fsdp_forward_method(ours, method)
    for model in (ours, plain):
        getattr(model, method)(x).square().sum().backward()
    average_grads(plain)
    for name, p in ours.named_parameters():  # a unit's parameters have gradients together
        wanted = plain.get_parameter(name).grad
        if wanted is not None:
            torch.testing.assert_close(p.grad.full_tensor(), wanted)


@pytest.mark.ranks([1, 2])
def test_a_hook_of_forward_logs_full_tensors() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    norms: list[list[torch.Tensor]] = [[], []]
    for m, found in zip((ours, plain), norms, strict=True):

        def log(module: Any, inputs: Any, output: Any, found: Any = found) -> None:
            for p in module.parameters():
                found.append((p.full_tensor() if hasattr(p, "fsdpc") else p.detach()).norm())

        m.register_forward_hook(log)
        loss_of(m, batch(0, fsdpc.rank())).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)
    torch.testing.assert_close(*norms)
    for m, found in zip((ours, plain), norms, strict=True):

        def log_one(module: Any, inputs: Any, output: Any, found: Any = found) -> None:
            weight = module.blocks[0].linear.weight.detach()
            found[:] = [full(weight.norm()), full(weight[3]), full(weight.std())]

        m.register_forward_hook(log_one)
        m(batch(0, fsdpc.rank()))
    torch.testing.assert_close(*norms)


@pytest.mark.ranks([1, 2])
def test_arithmetic_of_penalties_is_left_alone() -> None:
    model = build()
    plain = twin(model)
    ours = shard(model)
    starts = [[p.detach().clone() for p in m.parameters()] for m in (ours, plain)]
    for m, start in zip((ours, plain), starts, strict=True):
        total: Any = 0
        for p, q in zip(m.parameters(), start, strict=True):
            total = total + (p - q + 1).pow(2).sum() + (p * torch.tanh(p)).sum()
            total = total + F.smooth_l1_loss(p, q + 2, reduction="none").sum()
        total.backward()
    assert_same_grads(ours, plain)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_that_reads_its_linears_weights(training: bool) -> None:
    """torch's fast path of it is not taken then, so that the linears run."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    ours = copy.deepcopy(plain)
    for part in (ours.linear1, ours.linear2, ours):
        fully_shard(part)
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(ours(x), plain(x))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("training", [False, True])
def test_a_projection_that_attention_reads_is_no_unit(training: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
    fully_shard(attention.out_proj)
    fully_shard(attention)
    x = torch.randn(2, 5, 8)
    with (
        torch.set_grad_enabled(training),
        pytest.raises(RuntimeError, match="unit 'out_proj' does not run there.*Do not shard"),
    ):
        attention(x, x, x)


class Cast(nn.Module):
    """A model that takes a dtype from another unit's weight."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.a, self.b, self.by = nn.Linear(7, 7), nn.Linear(7, 4), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(getattr(self.a(x), self.by)(self.b.weight))


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("by", ["to", "type_as"])
def test_a_weight_may_say_which_dtype(by: str) -> None:
    model = Cast(by)
    plain = twin(model)
    for m in (model.a, model.b, model):
        fully_shard(m)
    x = torch.ones(3, 7)
    torch.testing.assert_close(model(x), plain(x))
    assert getattr(model(x).sum(), by)(model.b.weight).ndim == 0
