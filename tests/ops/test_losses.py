"""Losses beside torch's, with reductions, weights, smoothing and ignored targets."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from beside import noise, same_as_torch
from oracle import FLOATS

import fsdpc

F = fsdpc.functional
IDS = np.array([[2, 0, -100], [4, 1, 1]])
WEIGHT = np.array([0.5, 1.0, 2.0, 0.25, 4.0])
REDUCTIONS = ["mean", "sum", "none"]


def probabilities(*shape):
    e = np.exp(noise(*shape, seed=9))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(smoothing, weighted, reduction, dtype):
    ours, theirs = fsdpc.tensor(IDS), torch.tensor(IDS).reshape(-1)
    w = fsdpc.tensor(WEIGHT, dtype="float64" if dtype == "float64" else "float32")
    tw = torch.tensor(WEIGHT)

    def op(x):
        return F.cross_entropy(x, ours, -100, reduction, w if weighted else None, smoothing)

    def reference(x):
        y = TF.cross_entropy(x.reshape(-1, 5), theirs, tw if weighted else None,
                             reduction=reduction, label_smoothing=smoothing)  # fmt: skip
        return y.reshape(2, 3) if reduction == "none" else y

    in_fp32 = reduction == "mean" and not weighted and not smoothing  # by one kernel
    same_as_torch(op, reference, [noise(2, 3, 5)], dtype, 30 if in_fp32 else 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_probabilities(smoothing, reduction):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    inputs = [noise(4, 5), probabilities(4, 5)]
    same_as_torch(
        partial(F.cross_entropy, **options), partial(TF.cross_entropy, **options), inputs, "float64"
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_nll_loss(dtype, weight, reduction):
    ids = IDS.reshape(-1)
    w = None if weight is None else fsdpc.tensor(weight)
    tw = None if weight is None else torch.tensor(weight)
    same_as_torch(
        lambda x: F.nll_loss(x, fsdpc.tensor(ids), -100, reduction, w),
        lambda x: TF.nll_loss(x, torch.tensor(ids), tw, reduction=reduction),
        [noise(6, 5)], dtype,
    )  # fmt: skip


OF_TWO = {
    "mse": (F.mse_loss, TF.mse_loss),
    "l1": (F.l1_loss, TF.l1_loss),
    "smooth l1": (F.smooth_l1_loss, TF.smooth_l1_loss),
    "bce": (
        lambda x, t, reduction: F.binary_cross_entropy_with_logits(x, t, reduction=reduction),
        lambda x, t, reduction: TF.binary_cross_entropy_with_logits(x, t, reduction=reduction),
    ),
    "kl": (F.kl_div, TF.kl_div),
    "kl of logarithms": (
        lambda x, t, reduction: F.kl_div(x, t, reduction, True),
        lambda x, t, reduction: TF.kl_div(x, t, reduction=reduction, log_target=True),
    ),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OF_TWO)
@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
def test_losses_of_two(name, reduction, dtype):
    op, theirs = OF_TWO[name]
    inputs = [3 * noise(4, 6), probabilities(4, 6)]
    op, theirs = partial(op, reduction=reduction), partial(theirs, reduction=reduction)
    same_as_torch(op, theirs, inputs, dtype, 3, name)


def test_bce_has_weights_and_does_not_overflow():
    w, pos = np.array([1.0, 0.5, 2.0]), np.array([3.0, 1.0, 0.1])
    ours, theirs = [fsdpc.tensor(a) for a in (w, pos)], [torch.tensor(a) for a in (w, pos)]
    same_as_torch(
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, ours[0], "mean", ours[1]),
        lambda x, t: TF.binary_cross_entropy_with_logits(x, t, theirs[0], pos_weight=theirs[1]),
        [noise(4, 3), probabilities(4, 3)], "float64",
    )  # fmt: skip
    x = fsdpc.tensor([500.0, -500.0, 0.0])
    loss = F.binary_cross_entropy_with_logits(x, fsdpc.tensor([1.0, 1.0, 0.5]), reduction="none")
    assert loss.tolist() == pytest.approx([0.0, 500.0, math.log(2)])


def test_kl_div_by_batch_and_of_zeros():
    target = probabilities(4, 3) * (np.arange(3) > 0)
    same_as_torch(
        lambda x: F.kl_div(x, fsdpc.tensor(target), "batchmean"),
        lambda x: TF.kl_div(x, torch.tensor(target), reduction="batchmean"),
        [noise(4, 3)], "float64",
    )  # fmt: skip


def test_nothing_counts():
    x, ids = fsdpc.zeros(2, 3), fsdpc.tensor([7, 7])
    assert math.isnan(F.cross_entropy(x, ids, 7).item())
    assert math.isnan(F.nll_loss(x, ids, 7).item())
    assert F.cross_entropy(x, ids, 7, "sum").item() == 0.0


def test_what_is_refused():
    x = fsdpc.zeros(2, 3)
    with pytest.raises(ValueError, match="reduction is 'mean', 'sum' or 'none', not 'max'"):
        F.mse_loss(x, x, "max")
    with pytest.raises(ValueError, match=r"label_smoothing is 1.5, not in \[0, 1\)"):
        F.cross_entropy(x, fsdpc.tensor([0, 1]), label_smoothing=1.5)
    with pytest.raises(IndexError):
        F.nll_loss(x, fsdpc.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"log_p \(2, 3\) and targets \(3,\) do not fit"):
        F.nll_loss(x, fsdpc.tensor([0, 1, 2]))
