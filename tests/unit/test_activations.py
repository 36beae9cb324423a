"""Modules without parameters beside torch's, losses among them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc import nn

X = np.random.default_rng(0).standard_normal((4, 3, 2))
ROWS = np.random.default_rng(1).standard_normal((4, 3))
IDS, P = np.array([0, 2, 1, -100]), np.full((4, 3), 1 / 3)
WEIGHT = np.array([1.0, 2.0, 0.5])

PAIRS = [
    (nn.ReLU(), torch.nn.ReLU(), [X]),
    (nn.GELU(), torch.nn.GELU(), [X]),
    (nn.GELU("tanh"), torch.nn.GELU("tanh"), [X]),
    (nn.SiLU(), torch.nn.SiLU(), [X]),
    (nn.Sigmoid(), torch.nn.Sigmoid(), [X]),
    (nn.Tanh(), torch.nn.Tanh(), [X]),
    (nn.Softmax(1), torch.nn.Softmax(1), [X]),
    (nn.Identity(7, unused=True), torch.nn.Identity(), [X]),
    (nn.Flatten(), torch.nn.Flatten(), [X]),
    (nn.Flatten(0, 1), torch.nn.Flatten(0, 1), [X]),
    (nn.MSELoss(), torch.nn.MSELoss(), [ROWS, P]),
    (nn.L1Loss("sum"), torch.nn.L1Loss(reduction="sum"), [ROWS, P]),
    (nn.KLDivLoss("batchmean"), torch.nn.KLDivLoss(reduction="batchmean"), [ROWS, P]),
    (nn.NLLLoss(), torch.nn.NLLLoss(), [ROWS, IDS]),
    (nn.MaxPool1d(2), torch.nn.MaxPool1d(2), [X.reshape(2, 3, 4)]),
    (nn.AvgPool1d(2, 1), torch.nn.AvgPool1d(2, 1), [X.reshape(2, 3, 4)]),
    (nn.MaxPool2d(2, 1, 1), torch.nn.MaxPool2d(2, 1, 1), [X[None]]),
    (nn.AvgPool2d(2, 1), torch.nn.AvgPool2d(2, 1), [X[None]]),
]


def compare(ours: nn.Module, theirs: torch.nn.Module, inputs: list[np.ndarray]) -> None:
    found = ours(*(fsdpc.tensor(x) for x in inputs))
    want = theirs(*(torch.tensor(x) for x in inputs))
    assert found.shape == tuple(want.shape)
    np.testing.assert_allclose(found.numpy(), want.numpy(), rtol=1e-6, atol=1e-9)
    assert type(ours).__name__ in repr(ours)


@pytest.mark.parametrize(("ours", "theirs", "inputs"), PAIRS, ids=lambda m: type(m).__name__)
def test_beside_torch(ours: nn.Module, theirs: torch.nn.Module, inputs: list[np.ndarray]) -> None:
    compare(ours, theirs, inputs)


def test_weights_beside_torch() -> None:
    """Tensors are made here: a module of tests that uses the engine starts it in each process."""
    for ours, theirs, target in (
        (nn.CrossEntropyLoss(fsdpc.tensor(WEIGHT), label_smoothing=0.1),
         torch.nn.CrossEntropyLoss(torch.tensor(WEIGHT), label_smoothing=0.1), IDS),
        (nn.BCEWithLogitsLoss(pos_weight=fsdpc.tensor(WEIGHT)),
         torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(WEIGHT)), P),
    ):  # fmt: skip
        compare(ours, theirs, [ROWS, target])


def test_reductions_are_checked_when_a_loss_is_made() -> None:
    with pytest.raises(ValueError, match="reduction is 'mean', 'sum' or 'none', not 'median'"):
        nn.MSELoss("median")
