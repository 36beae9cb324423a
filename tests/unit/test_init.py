"""Initial values: variances, shapes, refusals; the same from the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc import nn

init = nn.init
SHAPE = (96, 64, 3)  # fan in 192, fan out 288
RANDOM: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    # draws, standard deviation, largest magnitude
    "xavier_uniform": (init.xavier_uniform_, math.sqrt(2 / 480), math.sqrt(6 / 480)),
    "xavier_normal": (lambda p: init.xavier_normal_(p, 2), 2 * math.sqrt(2 / 480), math.inf),
    "kaiming_uniform": (init.kaiming_uniform_, math.sqrt(2 / 192), math.sqrt(6 / 192)),
    "kaiming_normal": (
        lambda p: init.kaiming_normal_(p, 0, "fan_out", "relu"), math.sqrt(2 / 288), math.inf
    ),
    "trunc_normal": (lambda p: init.trunc_normal_(p, 0, 1, -2, 2), 0.8796, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", RANDOM)
def test_random_values(name: str) -> None:
    fill, std, largest = RANDOM[name]
    fsdpc.manual_seed(3)
    p = fill(nn.Parameter.empty(SHAPE))
    a = p.detach().numpy()
    n = a.size
    assert abs(a.mean()) < 5 * std / math.sqrt(n)
    assert abs(a.std() / std - 1) < 5 / math.sqrt(n) and np.abs(a).max() <= largest * (1 + 1e-6)
    fsdpc.manual_seed(3)
    again = fill(fsdpc.empty(*SHAPE))  # a plain tensor too
    assert fsdpc.functional.array_equal(again, p)
    assert not fsdpc.functional.array_equal(fill(fsdpc.empty(*SHAPE)), p)


def test_deferred_parameters_are_drawn_later_by_the_same_numbers() -> None:
    fsdpc.manual_seed(1)
    with fsdpc.deferred_init():
        late = init.kaiming_normal_(nn.Parameter.empty((8, 4)))
        with pytest.raises(RuntimeError, match="orthogonal_ draws a parameter as a whole"):
            init.orthogonal_(nn.Parameter.empty((8, 4)))
    net = nn.ParameterList([late]).materialize()
    fsdpc.manual_seed(1)
    assert fsdpc.functional.array_equal(net[0], init.kaiming_normal_(nn.Parameter.empty((8, 4))))


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 2, 3)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    p = init.orthogonal_(nn.Parameter.empty(shape), 2.0)
    a = p.detach().numpy().reshape(shape[0], -1)
    product = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
    np.testing.assert_allclose(product, 4 * np.eye(len(product)), atol=1e-5)


def test_eye_and_gains() -> None:
    assert init.eye_(nn.Parameter.empty((2, 3))).tolist() == np.eye(2, 3).tolist()
    for name in ("linear", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu", "selu"):
        assert init.calculate_gain(name) == pytest.approx(torch.nn.init.calculate_gain(name))
    assert init.calculate_gain("leaky_relu", 0.5) == pytest.approx(math.sqrt(2 / 1.25))
    with pytest.raises(ValueError, match="no gain is known of 'gelu'"):
        init.calculate_gain("gelu")
    with pytest.raises(ValueError, match="has no fans"):
        init.xavier_uniform_(nn.Parameter.empty((3,)))
    with pytest.raises(ValueError, match="mode is 'fan_in' or 'fan_out'"):
        init.kaiming_normal_(nn.Parameter.empty((3, 3)), mode="fan")
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        init.orthogonal_(nn.Parameter.empty((3,)))
