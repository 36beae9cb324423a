"""Convolutions and pooling beside torch's."""

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
CASES = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (2, 0), "dilation": (2, 1)},
    {"groups": 2, "padding": 1},
    {"groups": 4},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_conv2d(options, dtype):
    inputs = [noise(2, 4, 7, 6), noise(8, 4 // options.get("groups", 1), 3, 2, seed=1) / 4]
    op, theirs = partial(F.conv2d, **options), partial(TF.conv2d, **options)
    same_as_torch(op, theirs, [*inputs, noise(8, seed=2)], dtype, 8)
    same_as_torch(op, theirs, inputs, dtype, 8)


@pytest.mark.parametrize("options", [{}, {"stride": 3, "padding": 2, "dilation": 2, "groups": 2}])
def test_conv1d(options):
    inputs = [noise(2, 4, 9), noise(6, 4 // options.get("groups", 1), 3, seed=1), noise(6, seed=2)]
    op, theirs = partial(F.conv1d, **options), partial(TF.conv1d, **options)
    same_as_torch(op, theirs, inputs, "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [(2,), (3, 1, 1), ((2, 3), (1, 2), (1, 0))], ids=str)
def test_pooling(options, dtype):
    a = np.random.default_rng(1).permutation(2 * 3 * 7 * 6).reshape(2, 3, 7, 6) / 16 - 7
    for ours, theirs in ((F.max_pool2d, TF.max_pool2d), (F.avg_pool2d, TF.avg_pool2d)):
        same_as_torch(lambda x: ours(x, *options), lambda x: theirs(x, *options), [a], dtype, 2)  # noqa: B023
    row = a[0, 0].reshape(1, 2, 21)
    for ours, theirs in ((F.max_pool1d, TF.max_pool1d), (F.avg_pool1d, TF.avg_pool1d)):
        same_as_torch(lambda x: ours(x, 3, 2, 1), lambda x: theirs(x, 3, 2, 1), [row], dtype, 2)  # noqa: B023


def test_equal_elements_and_nan():
    x = fsdpc.zeros(1, 1, 2, 4, requires_grad=True)
    F.max_pool2d(x, 2).sum().backward()
    t = torch.zeros(1, 1, 2, 4, requires_grad=True)
    TF.max_pool2d(t, 2).sum().backward()
    assert x.grad.tolist() == t.grad.tolist()  # the first
    for place in range(4):
        a = np.arange(4.0).reshape(1, 1, 2, 2)
        a.reshape(-1)[place] = math.nan
        assert math.isnan(F.max_pool2d(fsdpc.tensor(a), 2).item())


def test_what_is_refused():
    x, w = fsdpc.zeros(1, 4, 5, 5), fsdpc.zeros(6, 4, 3, 3)
    with pytest.raises(ValueError, match=r"4 channels and weight \(6, 4, 3, 3\), in 2 groups"):
        F.conv2d(x, w, groups=2)
    with pytest.raises(ValueError, match=r"no window of \(3, 3\) fits the padded input, \(5, 5\)"):
        F.conv2d(x, w, dilation=3)
    with pytest.raises(ValueError, match=r"padding 'same' with stride \(2, 2\)"):
        F.conv2d(x, w, stride=2, padding="same")
    with pytest.raises(ValueError, match="both need 4 dimensions"):
        F.conv2d(x[0], w)
    with pytest.raises(ValueError, match="both need 3 dimensions"):
        F.conv1d(x, w)
    with pytest.raises(ValueError, match="must be positive"):
        F.max_pool2d(x, 0)
