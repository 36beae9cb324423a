"""Parameters that a step does not use: no gradient, no step, no state; used on any rank, used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn

from .test_strategies import variants

STEPS = 4


class Branches(nn.Module):
    """Three layers in one unit, of which a call runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.idle = nn.Linear(8, 8)

    def forward(self, x: Any, used: list[int]) -> Any:
        for k in used:
            x = self.layers[k](x)
        return x


def layers_of(step: int, rank: int) -> list[int]:
    """Layer 1 is used at every other step alone, layer 2 by the last of the ranks then."""
    if step % 2 == 0:
        return [0]
    return [0, 1, 2] if rank == fsdpc.world_size() - 1 else [0, 1]


def loss_of(model: Any, step: int, rank: int, micro: int) -> Any:
    x = np.random.default_rng([step, rank, micro]).standard_normal((4, 8)).astype(np.float32)
    y = model(fsdpc.tensor(x), layers_of(step + micro, rank))
    return (y * y).mean()


def optimizer_of(kind: str, model: Any) -> Any:
    named = model.named_parameters()
    if kind == "SGD":
        return fsdpc.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1)
    dtype = fsdpc.bfloat16 if kind == "bf16" else None
    return fsdpc.optim.AdamW(named, lr=0.05, weight_decay=0.5, state_dtype=dtype, seed=3)


def train(model: Any, kind: str, micros: int, sync: bool) -> dict[str, Any]:
    """What every step leaves: gradients, norms, values, states."""
    optimizer = optimizer_of(kind, model)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micros):
            if not sync:
                model.set_requires_gradient_sync(micro == micros - 1)
            loss_of(model, step, fsdpc.rank(), micro).backward()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (fsdpc.full_grad(p) is None)
            found[f"{step} has {name}"] = p.grad is not None
        found[f"{step} norm"] = fsdpc.clip_grad_norm_(model, 0.5).item()
        optimizer.step()
        for name, p in model.named_parameters():
            found[f"{step} value {name}"] = fsdpc.full_tensor(p).numpy().tobytes()
    for name, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"{key} {name}"] = value if key == "step" else value.numpy().tobytes()
    return found


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "bf16"])
def test_a_parameter_that_no_rank_used_stays_as_it_is(kind: str) -> None:
    for micros, sync in ((1, True), (2, True), (2, False)):
        expected = None
        for name, options in variants().items():
            fsdpc.manual_seed(5)
            model = fsdpc.fully_shard(Branches(), **options)
            before = fsdpc.full_tensor(model.idle.weight).numpy().tobytes()
            found = train(model, kind, micros, sync)
            assert found[f"{STEPS - 1} value idle.weight"] == before
            assert "step idle.weight" not in found
            assert found["step layers.0.weight"] == STEPS
            if micros == 1:
                assert not found["0 has layers.1.weight"] and found["1 has layers.2.weight"]
                assert found["step layers.2.weight"] == STEPS // 2
            expected = expected or found
            assert found == expected, name


@pytest.mark.ranks(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "bf16"])
def test_one_rank_does_what_an_unsharded_model_does(kind: str, deterministic: bool) -> None:
    fsdpc.shutdown()
    fsdpc.init(deterministic=deterministic)
    for micros in (1, 2):
        fsdpc.manual_seed(5)
        plain = Branches()
        fsdpc.manual_seed(5)
        sharded = fsdpc.fully_shard(Branches())
        assert train(plain, kind, micros, True) == train(sharded, kind, micros, True)


@pytest.mark.ranks([1, 2])
def test_gradients_that_were_given_up_are_no_gradients() -> None:
    fsdpc.manual_seed(5)
    model = fsdpc.fully_shard(Branches())
    with model.no_sync():
        loss_of(model, 1, fsdpc.world_size() - 1, 0).backward()
    model.layers[0].weight.grad = None  # of the unit
    loss_of(model, 0, fsdpc.rank(), 0).backward()
    assert model.layers[0].weight.grad is not None
    assert model.layers[1].weight.grad is None
    assert list(fsdpc.grad_norms(model)) == ["layers.0.weight", "layers.0.bias"]
