"""Small torch models, sharded and plain, trained on every rank's own batches."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first use: here once, not on every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdpc
from fsdpc.torch import fully_shard

RTOL, ATOL = 1.3e-6, 1e-5


class Block(nn.Module):
    """x + gelu(linear(layer_norm(x)))."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks between two linear layers of odd sizes."""

    def __init__(self, dim: int = 20, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(7, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(blocks)])
        self.last = nn.Linear(dim, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Checkpointed(Net):
    """Blocks under activation checkpointing."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def build(seed: int = 3, **sizes: int) -> Net:
    """The same model on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return Net(**sizes)


def shard(model: Net, **options: Any) -> Any:
    """Every block a unit, and the rest one."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(step: int, rank: int, micro: int = 0, rows: int = 4) -> torch.Tensor:
    """Inputs of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(rows, 7, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients reach everything."""
    return (model(x) ** 2).mean()


# ---- which backwards of a step reduce ----


def no_sync(m: Any, last: bool) -> None:
    m.set_requires_gradient_sync(last)


def no_all_reduce(m: Any, last: bool) -> None:
    m.set_requires_all_reduce(last)


def no_wait(m: Any, last: bool) -> None:
    m.set_is_last_backward(last)


def every_one(m: Any, last: bool) -> None:
    pass


def average_grads(model: nn.Module) -> None:
    """What a plain model needs on each rank to train as one."""
    grads = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    for dtype in sorted({g.dtype for g in grads}, key=str):
        some = [g for g in grads if g.dtype is dtype]
        flat = torch.cat([g.flatten() for g in some])
        mean = torch.from_dlpack(fsdpc.all_reduce(fsdpc.from_dlpack(flat), "mean"))
        for g, each in zip(some, mean.split([g.numel() for g in some]), strict=True):
            g.copy_(each.view(g.shape))


def train_twins(ours: Any, plain: nn.Module, optimizers: Any, steps: int, **clip: Any) -> None:
    """Train both and compare the loss of every step and all parameters at the end."""
    rank = fsdpc.rank()
    for step in range(steps):
        x = batch(step, rank)
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            losses.append(loss.detach())
            if model is plain:
                average_grads(plain)
            if clip:
                clip["fn"](model.parameters(), clip["max_norm"])
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1], rtol=RTOL, atol=ATOL)
    assert_same_parameters(ours, plain)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full values by name; collective."""
    return {name: full(p) for name, p in model.named_parameters()}


def full(t: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor that a DTensor is of, or of a plain one; collective."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def assert_same_parameters(ours: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Every parameter, by name."""
    tolerance = tolerance or {"rtol": RTOL, "atol": ATOL}
    unsharded = full_parameters(ours)
    theirs = dict(plain.named_parameters())
    assert unsharded.keys() == theirs.keys()
    for name, value in unsharded.items():
        torch.testing.assert_close(
            value, theirs[name].detach(), **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def twin(model: nn.Module) -> nn.Module:
    """A copy made before sharding."""
    return copy.deepcopy(model)


def assert_same_grads(ours: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Full gradients, by name; collective."""
    tolerance = tolerance or {"rtol": RTOL, "atol": ATOL}
    theirs = dict(plain.named_parameters())
    for name, p in ours.named_parameters():
        grad = fsdpc.torch.full_grad(p)
        expected = theirs[name].grad
        assert (grad is None) == (expected is None), name
        if grad is not None:
            torch.testing.assert_close(
                grad, expected, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def end_step(ours: Any, plain: nn.Module) -> None:
    """The gradients of both agree; the next step begins with none."""
    assert_same_grads(ours, plain)
    ours.zero_grad()
    plain.zero_grad()


def both(ours: Any, plain: nn.Module, step: int = 0) -> None:
    """One backward of each, the plain one on averaged gradients."""
    x = batch(step, fsdpc.rank())
    for model in (ours, plain):
        loss_of(model, x).backward()
    average_grads(plain)


def assert_same_steps(ours: Any, plain: nn.Module) -> None:
    """Three backwards of each end with the same gradients."""
    for step in range(3):
        both(ours, plain, step)
        end_step(ours, plain)


def join_gloo(folder: Any, backend: str = "gloo") -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
