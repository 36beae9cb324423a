"""torch.compile inside units and around the root."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard

from .common import (
    assert_same_parameters,
    average_grads,
    batch,
    both,
    build,
    loss_of,
    shard,
    twin,
)


class Inner(nn.Module):
    """What is compiled: a module of the user's own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * 2


class Outer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.norm = Inner(dim), nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_blocks_are_not_compiled_again(whole: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Outer(8) for _ in range(3)])
    ours = twin(plain)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for i, block in enumerate(ours):
        if whole:
            ours[i] = torch.compile(block, backend=count)
            fully_shard(ours[i])
        else:
            block.inner.compile(backend=count)
            fully_shard(block)
    fully_shard(ours)
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2 * step + fsdpc.rank()))
        for m in (ours, plain):
            m(x).square().mean().backward()
        average_grads(plain)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(fsdpc.torch.full_grad(p), q.grad, rtol=1.3e-6, atol=1e-5)
        ours.zero_grad()
        plain.zero_grad()
        if step == 0:
            compiled = len(graphs)
    assert compiled >= 1 and len(graphs) == compiled


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("low", [False, True])
def test_a_compiled_root_compiles_what_is_the_users(low: bool) -> None:
    """Nothing around units is traced, so nothing is warned of and no fragment compiled."""
    policy = MixedPrecisionPolicy(torch.bfloat16 if low else None, torch.float32)
    model = build()
    plain = shard(twin(model), mp_policy=policy)
    ours = shard(model, mp_policy=policy)
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(ours, backend=keep)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(fsdpc|Dynamo)")
        for step in range(3):
            loss_of(compiled, batch(step, fsdpc.rank())).backward()
            loss_of(plain, batch(step, fsdpc.rank())).backward()
    calls = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("gelu" in call for call in calls)
    assert not any("fsdpc" in call or call == "to" for call in calls), calls
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.ranks([1, 2])
def test_functions_of_sharded_parameters_compile() -> None:
    """Optimizers that compile their own steps (torchao's) get parameters, gradients and states."""
    ours, plain = shard(build()), build()

    def step(p: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor) -> None:
        mean.lerp_(grad, 0.1)
        p.copy_(p.float() - 0.1 * mean / (mean.square() + 1e-3).sqrt())

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)
    for _ in range(2):
        both(ours, plain)
        for model, how in ((ours, compiled), (plain, step)):
            means = [torch.full_like(p, 0.5) for p in model.parameters()]
            with torch.no_grad():
                for p, mean in zip(model.parameters(), means, strict=True):
                    how(p.detach(), p.grad.detach(), mean)
            model.zero_grad()
        assert_same_parameters(ours, plain)
    torch._dynamo.reset()
