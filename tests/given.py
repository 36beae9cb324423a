"""Models whose gradients are given, for tests of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fsdpc
from fsdpc import nn, optim


class Holder(nn.Module):
    """Parameters of these shapes, with the same values on every rank."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: Any = fsdpc.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            start = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
            setattr(self, name, nn.Parameter(fsdpc.tensor(start).to(dtype)))

    def forward(self, gradients: dict[str, Any]) -> Any:
        terms = [(p * gradients[name]).sum() for name, p in self.named_parameters()]
        return sum(terms[1:], terms[0])


def sharded(model: Holder, **options: Any) -> Holder:
    """Shard a model so that gradients are summed over ranks."""
    fsdpc.fully_shard(model, **options).set_gradient_divide_factor(1.0)
    return model


def run(
    model: Holder,
    optimizer: Any,
    gradients: Callable[[int], dict[str, np.ndarray]],
    steps: range,
    clip: float = 0,
) -> None:
    """Only rank 0 has gradients, so their sum is exact."""
    first = next(iter(model.parameters()))
    share = np.float32(first._unit is None or fsdpc.rank() == 0)
    for step in steps:
        given = {n: fsdpc.tensor(g * share).to(first.dtype) for n, g in gradients(step).items()}
        model(given).backward()
        if clip:
            fsdpc.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()


def everything(model: Holder, optimizer: Any) -> dict[str, np.ndarray]:
    """Full parameters and states by name."""
    found = {n: fsdpc.full_tensor(p).numpy().copy() for n, p in model.named_parameters()}
    for name, states in optim.get_optimizer_state_dict(model, optimizer)["state"].items():
        found |= {f"{name} {k}": np.asarray(v) for k, v in states.items()}
    return found


def assert_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert np.array_equal(value, b[name]), name
