"""``fsdpc.torch.linear_cross_entropy`` against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as TF

from fsdpc import _core, memory_stats
from fsdpc.torch import fully_shard, linear_cross_entropy
from tests.events import event_counts

from .common import assert_same_grads, average_grads

MIB = 1 << 20


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 16, dtype=dtype, requires_grad=True)
    w = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    target = torch.randint(0, 50, (2, 7))
    target[0, 1] = -100
    return x, w, target


def definition(x: Any, w: Any, target: Any, softcap: float, z_loss: float, **options: Any) -> Any:
    logits = TF.linear(x, w).reshape(-1, 50)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = TF.cross_entropy(logits, target.reshape(-1), **options)
    more = z_loss * logits.logsumexp(-1) ** 2 * (target.reshape(-1) != -100)
    if options["reduction"] == "none":
        return (loss + more).reshape(target.shape)
    return loss + more.sum() / (13 if options["reduction"] == "mean" else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, softcap, z_loss", [(0, 0, 0), (0.1, 5.0, 0.01)])
def test_values(
    smoothing: float, softcap: float, z_loss: float, reduction: str, dtype: torch.dtype
) -> None:
    x, w, target = operands(dtype)
    options = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap,
               "z_loss": z_loss}  # fmt: skip
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    loss, want = linear_cross_entropy(x, w, target, **options), definition(*wide, target, **options)
    assert loss.dtype is torch.float32 and loss.shape == want.shape
    factors = torch.linspace(-1, 1, loss.numel()).reshape(loss.shape) if loss.dim() else 1
    (loss * factors).sum().backward()
    (want * factors).sum().backward()
    near = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    torch.testing.assert_close(loss.double(), want, rtol=near[dtype], atol=near[dtype])
    for t, wanted in zip((x, w), wide, strict=True):
        assert t.grad.dtype is dtype
        torch.testing.assert_close(t.grad.double(), wanted.grad, rtol=near[dtype], atol=near[dtype])


def test_only_what_needs_a_gradient() -> None:
    x, w, target = operands(torch.float32)
    linear_cross_entropy(x.detach(), w, target).backward()
    assert x.grad is None and w.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(x, w, target).requires_grad


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.ranks(2)
def test_a_sharded_head(frozen: bool) -> None:
    """Read inside its unit, or as a DTensor outside."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 50, bias=False)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(self.body(x), self.head.weight, target)

    torch.manual_seed(0)
    plain, ours = Model(), Model()
    ours.load_state_dict(plain.state_dict())
    plain.head.requires_grad_(not frozen)
    ours.head.requires_grad_(not frozen)
    fully_shard(ours)
    x, target = torch.randn(5, 8), torch.tensor([1, 2, -100, 7, 49])
    for model in (plain, ours):
        model(x, target).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)
    outside = linear_cross_entropy(torch.ones(1, 16), ours.head.weight, target[:1])
    inside = TF.cross_entropy(plain.head(torch.ones(1, 16)), target[:1])
    torch.testing.assert_close(outside, inside)


class LossHead(torch.nn.Linear):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, self.weight, target)


class Split(torch.nn.Module):
    """A body, and a head in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 16), LossHead(16, 50, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh(), target)


@pytest.mark.ranks(2)
def test_a_head_in_its_own_unit_is_gathered_once_per_step() -> None:
    """Its backward follows its forward, so it stays gathered once a step has been recorded."""
    model = Split()
    fully_shard(model.head)
    fully_shard(model)
    x, target = torch.randn(5, 8), torch.tensor([1, 2, -100, 7, 49])
    gathers = []
    for _ in range(3):
        _core.trace_reset()
        model(x, target).backward()
        gathers.append(event_counts()["gather"])
        assert model.head.weight.to_local().shape == (25, 16)  # resharded
    assert gathers == [3, 2, 2]


def test_autocast_and_compile() -> None:
    x, w, target = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, w, target)
    torch.testing.assert_close(loss, linear_cross_entropy(x.bfloat16(), w.bfloat16(), target))

    def run(x: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x.tanh(), w, target) * 2

    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(x), run(x))


def test_bad_input() -> None:
    x, w, target = operands(torch.float32)
    with pytest.raises(TypeError, match=r"input is torch.float32 and weight torch.bfloat16"):
        linear_cross_entropy(x, w.bfloat16(), target)
    with pytest.raises(ValueError, match="reduction is 'max'"):
        linear_cross_entropy(x, w, target, reduction="max")
    with pytest.raises(IndexError, match="target 50 at row 0"):
        linear_cross_entropy(x, w, torch.full((2, 7), 50))
    with pytest.raises(ValueError, match="weight"):
        linear_cross_entropy(x, w[:, :8], target)
    loss = linear_cross_entropy(x, w, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="it can run once"):
        loss.backward()
    other = linear_cross_entropy(x, w, target)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


class Wide(torch.nn.Module):
    """A head whose logits take several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 4), torch.nn.Linear(4, 30000, bias=False)
        self.hooks: list[Any] = []
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.seen = [self.head.weight]
        for hook in self.hooks:
            self.head.weight.register_hook(hook)
        return linear_cross_entropy(self.body(x), self.head.weight, target)


@pytest.mark.ranks(2)
def test_a_weights_gradient_has_no_second_copy() -> None:
    """Unless hooks or autograd.grad() ask torch for it."""
    torch.manual_seed(0)
    plain, ours = Wide(), Wide()
    ours.load_state_dict(plain.state_dict())
    fully_shard(ours)
    batches = [(torch.randn(500, 8), torch.randint(0, 30000, (500,))) for _ in range(2)]

    def forward(step: int) -> tuple[torch.Tensor, bool]:
        before = memory_stats()["activation_bytes"]
        loss = ours(*batches[step])
        return loss, memory_stats()["activation_bytes"] - before < 4 * plain.head.weight.numel()

    before = memory_stats()["activation_bytes"]
    loss, borrows = forward(0)
    again, twice = forward(1)
    assert borrows and not twice
    for each in (again, loss):  # the second, which moves what the first one keeps
        each.backward()
    for step in (1, 0):
        plain(*batches[step]).backward()
    average_grads(plain)
    assert_same_grads(ours, plain)
    loss, borrows = forward(0)
    (found,) = torch.autograd.grad(loss, ours.seen)
    (wanted,) = torch.autograd.grad(plain(*batches[0]), plain.head.weight)
    assert borrows
    torch.testing.assert_close(found, wanted)
    ours.hooks.append(lambda gradient: 2 * gradient)
    for model in (plain, ours):
        model.zero_grad()
    loss, borrows = forward(0)
    assert not borrows
    loss.backward()
    assert ours.head.weight.grad is not None
    torch.testing.assert_close(ours.head.weight.grad.full_tensor(), 2 * wanted)
    del loss, each, again, found, wanted
    assert memory_stats()["activation_bytes"] == before
