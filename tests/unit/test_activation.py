"""Which modules recompute their activations: all, every n-th, a ratio, or chosen ones."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import fsdpc
from fsdpc import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(3, 3)
        self.feed = nn.Linear(3, 3)
        self.runs = 0

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        self.runs += 1
        return self.feed(self.attention(x).tanh()).tanh()


def blocks(n: int) -> list[Block]:
    fsdpc.manual_seed(1)
    return [Block() for _ in range(n)]


def train(layers: list[Block]) -> list[bytes]:
    x = fsdpc.tensor(np.ones((2, 3), np.float32))
    for layer in layers:
        x = layer(x)
    x.sum().backward()
    return [p.grad.numpy().tobytes() for layer in layers for p in layer.parameters()]


@pytest.mark.parametrize(
    ("which", "chosen"),
    [
        ("all", [0, 1, 2, 3, 4]),
        (1, [0, 1, 2, 3, 4]),
        (2, [0, 2, 4]),
        (9, [0]),
        (1.0, [0, 1, 2, 3, 4]),
        (0.5, [1, 3]),
        (0.1, []),
    ],
)
def test_blocks_that_run_twice(which: object, chosen: list[int]) -> None:
    plain = train(blocks(5))
    layers = blocks(5)
    assert fsdpc.checkpoint_activations(layers, which) == len(chosen)
    assert train(layers) == plain
    assert [i for i, layer in enumerate(layers) if layer.runs == 2] == chosen


def test_a_function_is_asked_of_all_modules_inside() -> None:
    layers = blocks(3)
    attention = {id(layer.attention) for layer in layers}
    assert fsdpc.checkpoint_activations(layers, lambda m: id(m) in attention) == 3
    assert train(layers) == train(blocks(3))
    assert [layer.runs for layer in layers] == [1, 1, 1]  # not the blocks themselves
    assert all("forward" in layer.attention.__dict__ for layer in layers)


def test_nothing_is_recomputed_without_gradients() -> None:
    layers = blocks(2)
    fsdpc.checkpoint_activations(layers)
    with fsdpc.no_grad():
        layers[0](fsdpc.tensor(np.ones((1, 3), np.float32)))
    assert layers[0].runs == 1


@pytest.mark.parametrize("which", [0, -1, 0.0, 1.5, True, None, "some"])
def test_choices_that_are_none(which: object) -> None:
    with pytest.raises(ValueError, match="'all', a positive int, a ratio or a function, got"):
        fsdpc.checkpoint_activations(blocks(1), which)


def test_a_copy_recomputes_its_own_forward() -> None:
    (layer,) = blocks(1)
    fsdpc.checkpoint_activations([layer])
    (twin,) = copy.deepcopy([layer])
    train([twin])
    assert (layer.runs, twin.runs) == (0, 2) and layer.feed.weight.grad is None
