"""Block-coded states under torch: the bits of the native optimizer, in state dicts and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc import checkpoint, nn, optim
from fsdpc.torch import fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
from fsdpc.torch.optim import SGD, AdamW, Lion, RMSprop

SHAPES = {"wide": (37, 512), "uneven": (50, 320), "small": (8, 64), "bias": (5000,)}
KINDS: dict[Any, dict[str, Any]] = {
    AdamW: {},
    SGD: {"momentum": 0.9},
    Lion: {},
    RMSprop: {"momentum": 0.5},
}


def grads(step: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(step)
    return {
        name: (chance.integers(-127, 128, shape) * 2.0 ** -chance.integers(4, 20)).astype("f4")
        for name, shape in SHAPES.items()
    }


def values() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(99)
    return {name: chance.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in values().items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))

    def forward(self, step: int) -> torch.Tensor:
        held = grads(step)
        return sum((p * torch.from_numpy(held[n])).sum() for n, p in self.named_parameters())


def train(model: Any, optimizer: Any, steps: range = range(3)) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def native(kind: str, steps: int = 3, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and states after native steps in one process."""
    params = {name: nn.Parameter(fsdpc.tensor(value)) for name, value in values().items()}
    optimizer = getattr(optim, kind)(params.items(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        held = grads(step)
        for name, p in params.items():
            (p * fsdpc.tensor(held[name])).sum().backward()
        optimizer.step()
    return params, optimizer.state_dict()["state"]


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_bits_are_those_of_the_native_optimizer(kind: Any) -> None:
    model = fully_shard(Model())
    optimizer = kind(model.parameters(), lr=1e-2, state_dtype="int8", **KINDS[kind])
    train(model, optimizer)
    params, states = native(kind.__name__, lr=1e-2, state_dtype="int8", **KINDS[kind])
    held = get_optimizer_state_dict(model, optimizer)["state"]
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(p.full_tensor().detach().numpy(), params[name].detach())
        for state, value in states[name].items():
            np.testing.assert_array_equal(np.asarray(held[name][state]), value, f"{state} {name}")
    fresh = kind(model.parameters(), lr=1e-2, state_dtype="int8", **KINDS[kind])
    set_optimizer_state_dict(model, fresh, get_optimizer_state_dict(model, optimizer))
    own = kind(model.parameters(), lr=1e-2, state_dtype="int8", **KINDS[kind])
    own.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        for loaded in fresh, own:
            for state, rows in loaded.state_rows(p).items():
                np.testing.assert_array_equal(rows, optimizer.state_rows(p)[state], state)


@pytest.mark.ranks([2])
def test_folders_load_in_either_format(tmp_path: Path) -> None:
    for saves, loads in (("int8", None), ("int8", "int8"), (None, "int8"), (None, torch.bfloat16)):
        model, again = fully_shard(Model()), fully_shard(Model())
        optimizer = AdamW(model.parameters(), lr=1e-2, state_dtype=saves)
        other = AdamW(again.parameters(), lr=1e-2, state_dtype=loads)
        train(model, optimizer)
        folder = tmp_path / f"{saves}-{loads}"
        checkpoint.save(folder, {"model": model, "optimizer": optimizer})
        checkpoint.load(folder, {"model": again, "optimizer": other})
        first = get_optimizer_state_dict(model, optimizer)["state"]
        second = get_optimizer_state_dict(again, other)["state"]
        for name, states in first.items():
            for state, value in states.items():
                near = 0 if saves == "int8" else 0.02 * float(value.abs().max())
                found = second[name][state].float()
                assert (found - value).abs().max() <= near, (saves, loads, name, state)


@pytest.mark.ranks([1, 2])
def test_writes_into_decoded_copies_are_refused() -> None:
    """A coded state is decoded when it is read; a write into the copy would be lost."""
    model = fully_shard(Model())
    optimizer = AdamW(model.parameters(), lr=1e-2, state_dtype="int8")
    train(model, optimizer)
    wide = model.get_parameter("wide")
    before = optimizer.state[wide]["exp_avg"].full_tensor()
    with pytest.raises(NotImplementedError, match="into a state of .*wide.* a decoded copy"):
        optimizer.state[wide]["exp_avg"].zero_()
    with pytest.raises(NotImplementedError, match="a decoded copy"):
        torch._foreach_mul_([optimizer.state[wide]["exp_avg_sq"]], 0.5)
    assert torch.equal(optimizer.state[wide]["exp_avg"].full_tensor(), before)
    optimizer.state[wide]["exp_avg"].clone().zero_()
    bias = model.get_parameter("bias")
    optimizer.state[bias]["exp_avg"].zero_()  # float states are the engine's memory
    assert not optimizer.state[bias]["exp_avg"].full_tensor().any()
