"""Linear layers on the engine's products: torch's results, gradients straight into the engine."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import (
    MixedPrecisionPolicy,
    _checks,
    _device,
    full_grad,
    fully_shard,
    kernels,
    use_kernels,
)

from .common import (
    average_grads,
    batch,
    build,
    full_parameters,
    loss_of,
    shard,
    train_twins,
)

CLOSE = {
    torch.float32: {"rtol": 1.3e-6, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.016, "atol": 0.05},
}


class Taken:
    """Counts gradients of weights that units took, and those they did not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.yes = self.no = 0
        real = kernels._takes

        def spy(*args: Any) -> bool:
            taken = real(*args)
            self.yes, self.no = self.yes + taken, self.no + (not taken)
            return taken

        monkeypatch.setattr(kernels, "_takes", spy)


def linears(dtype: torch.dtype, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    plain = nn.Linear(33, 17, bias=bias, dtype=dtype)
    return plain, use_kernels(copy.deepcopy(plain))  # type: ignore[return-value]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 3, 33), (0, 33), (64, 33)])
def test_values_and_gradients_are_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool
) -> None:
    plain, ours = linears(dtype, bias)
    x = torch.randn(shape, dtype=dtype)
    results = []
    for layer in (plain, ours):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.float().square().sum().backward()
        results.append((y, own.grad, *(p.grad for p in layer.parameters())))
    assert type(ours).__name__ == "KernelLinear"
    assert results[1][0].grad_fn is not None and "_Product" in results[1][0].grad_fn.name()
    for his, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, his, **CLOSE[dtype])


def test_inputs_that_are_views() -> None:
    plain, ours = linears(torch.float32, True)
    x = torch.randn(33, 6)
    torch.testing.assert_close(ours(x.t()), plain(x.t()))
    torch.testing.assert_close(ours(x.t()[::2]), plain(x.t()[::2]))
    gradient = torch.randn(17, 6).t()  # not contiguous either
    for layer in (plain, ours):
        layer(x.t()).backward(gradient)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)


def test_what_does_not_fit_computes_as_before() -> None:
    plain, ours = linears(torch.float32, True)
    x = torch.randn(4, 33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x).dtype is torch.bfloat16
        assert torch.equal(ours(x), plain(x))
    assert torch.equal(torch.func.vmap(ours)(x), torch.func.vmap(plain)(x))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert ours(mode.from_tensor(x)).shape == (4, 17)  # such tensors have no memory
    assert torch.equal(ours.double()(x.double()), plain.double()(x.double()))
    assert use_kernels(nn.Linear(3, 4, device="meta"))(torch.empty(2, 3, device="meta")).is_meta
    ours.float()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        ours(torch.randn(4, 32))
    with pytest.raises(RuntimeError, match="dtype"):
        ours(x.double())


def test_without_gradients() -> None:
    plain, ours = linears(torch.float32, True)
    x = torch.randn(4, 33)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = ours(x)
            assert not y.requires_grad
            torch.testing.assert_close(y, plain(x))


def test_a_backward_is_not_differentiated_again() -> None:
    _, ours = linears(torch.float32, True)
    x = torch.randn(4, 33, requires_grad=True)
    (dx,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_which_layers_change() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 3), Own(3, 3), nn.Sequential(nn.Linear(3, 3)))
    names = list(model.state_dict())
    assert use_kernels(model) is model
    assert [type(m).__name__ for m in (model[0], model[1], model[2][0])] == [
        "KernelLinear", "Own", "KernelLinear",
    ]  # fmt: skip
    assert list(model.state_dict()) == names and isinstance(model[0], nn.Linear)


@pytest.mark.ranks(1)
def test_a_sharded_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model[1])
    with pytest.raises(RuntimeError, match=r"'1' is sharded already; call it before fully_shard"):
        use_kernels(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("takes_back", [False, True])
def test_training_is_a_plain_models(monkeypatch: pytest.MonkeyPatch, takes_back: bool) -> None:
    """Also where torch has the memory of gradients in between."""
    monkeypatch.setattr(_device, "takes_back", lambda: takes_back)
    plain = build()
    ours = shard(use_kernels(copy.deepcopy(plain)))  # type: ignore[arg-type]
    taken = Taken(monkeypatch)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
    train_twins(ours, plain, optimizers, 4)
    assert (taken.yes, taken.no) == (4 * 5, 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduce", [None, torch.float32, torch.bfloat16])
def test_mixed_precision(reduce: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without kernels, up to bf16: in float32 buffers gradients are not rounded in between."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    plain = build()
    theirs = shard(copy.deepcopy(plain), mp_policy=policy)
    ours = shard(use_kernels(plain), mp_policy=policy)  # type: ignore[arg-type]
    taken = Taken(monkeypatch)
    x = batch(0, fsdpc.rank())
    for model in (ours, theirs):
        loss_of(model, x).backward()
    assert (taken.yes, taken.no) == (5, 0)
    for mine, his in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(full_grad(mine), full_grad(his), rtol=0.05, atol=2e-3)


@pytest.mark.ranks(2)
def test_a_reduce_dtype_that_products_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    ours = shard(use_kernels(plain), mp_policy=policy)  # type: ignore[arg-type]
    taken = Taken(monkeypatch)
    loss_of(ours, batch(0, fsdpc.rank())).backward()
    assert (taken.yes, taken.no) == (0, 5)
    assert all(p.grad is not None for p in ours.parameters())


class Shared(nn.Module):
    """One layer twice, one weight also as an embedding, one layer frozen, one checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.twice = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = self.twice(torch.tanh(self.twice(x)))
        x = checkpoint(self.again, self.frozen(x), use_reentrant=False)
        return self.head(x)


@pytest.mark.ranks(2)
def test_weights_that_are_used_twice_tied_frozen_or_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(2)
    plain = Shared()
    ours = fully_shard(use_kernels(copy.deepcopy(plain)))
    taken = Taken(monkeypatch)
    for step in range(2):  # two backwards add up
        generator = torch.Generator().manual_seed(10 * step + fsdpc.rank())
        ids = torch.randint(0, 11, (3, 4), generator=generator)
        for model in (ours, plain):
            model(ids).square().mean().backward()
    assert (taken.yes, taken.no) == (2 * 4, 0)
    average_grads(plain)
    theirs = dict(plain.named_parameters())
    for name, p in ours.named_parameters():
        expected = theirs[name].grad
        assert (p.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(full_grad(p), expected, rtol=1.3e-6, atol=1e-6)


@pytest.mark.ranks(2)
def test_no_sync_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build()
    ours = shard(use_kernels(copy.deepcopy(plain)))  # type: ignore[arg-type]
    ours.set_requires_gradient_sync(False)
    for micro in range(3):
        if micro == 2:
            ours.set_requires_gradient_sync(True)
        x = batch(0, fsdpc.rank(), micro)
        for model in (ours, plain):
            loss_of(model, x).backward()
    average_grads(plain)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_grad(p), q.grad, rtol=1.3e-6, atol=1e-6)


@pytest.mark.ranks(2)
def test_gradients_that_are_asked_for_by_name_are_not_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = build()
    ours = shard(use_kernels(copy.deepcopy(plain)))  # type: ignore[arg-type]
    taken = Taken(monkeypatch)
    x = batch(0, fsdpc.rank()).requires_grad_()
    (mine,) = torch.autograd.grad(loss_of(ours, x), x)
    (his,) = torch.autograd.grad(loss_of(plain, x), x)
    torch.testing.assert_close(mine, his, rtol=1.3e-6, atol=1e-6)
    loss_of(ours, x).backward(inputs=[x])
    assert taken.yes == 0
    assert all(p.grad is None or not full_grad(p).any() for p in ours.parameters())


@pytest.mark.ranks(2)
def test_both_modes_have_the_same_bits_with_and_without_resharding() -> None:
    """Full parameters after steps, with gathers again in backward and without."""
    results = []
    for reshard in (True, False):
        ours = shard(use_kernels(build()), reshard_after_forward=reshard)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        for step in range(3):
            loss_of(ours, batch(step, fsdpc.rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_parameters(ours))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.ranks(1)
def test_a_model_that_is_dropped_is_freed() -> None:
    ours = shard(use_kernels(build()))  # type: ignore[arg-type]
    loss_of(ours, batch(0, 0)).backward()
    ours.zero_grad()
    gone = weakref.ref(ours._fsdpc_state)
    del ours
    gc.collect()
    assert gone() is None


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("isa", ["avx2", "avx512bf16"])
def test_slow_bfloat16_products_are_said_once(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, said = fsdpc._core.runtime_config(), []
    monkeypatch.setattr(_checks._core, "runtime_config", lambda: {**known, "isa": isa})
    monkeypatch.setattr(_checks, "_warned", False)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdpc.torch").addHandler(handler)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(build())
    fully_shard(use_kernels(build()), mp_policy=policy)
    assert said == []
    for _ in range(2):
        fully_shard(build(), mp_policy=policy)
    fully_shard(build().bfloat16())
    logging.getLogger("fsdpc.torch").removeHandler(handler)
    assert len(said) == (isa == "avx2" and fsdpc.rank() == 0)
    assert all("no bfloat16 products" in line and "use_kernels(model)" in line for line in said)
