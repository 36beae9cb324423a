"""Convolutions and pooling beside torch's."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from beside import noise, same_as_torch
from oracle import FLOATS, values

import fsdpc
from fsdpc import _core

F = fsdpc.functional
CASES = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (2, 0), "dilation": (2, 1)},
    {"groups": 2, "padding": 1},
    {"groups": 4},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"padding": (5, 4), "stride": (4, 3)},  # beyond the kernel: windows of zeros, elements of none
    {"padding": 3, "stride": (2, 4), "dilation": (2, 6)},  # strides and dilations share factors
    {"padding": 1, "stride": (3, 9), "groups": 2},  # a stride beyond the width
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_conv2d(options, dtype):
    inputs = [noise(2, 4, 7, 6), noise(8, 4 // options.get("groups", 1), 3, 2, seed=1) / 4]
    op, theirs = partial(F.conv2d, **options), partial(TF.conv2d, **options)
    same_as_torch(op, theirs, [*inputs, noise(8, seed=2)], dtype, 8)
    same_as_torch(op, theirs, inputs, dtype, 8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "sizes", [(3, 5, 33, 17, 9), (1, 1, 1, 1, 1), (2, 99, 19, 37, 21)], ids=str
)
def test_odd_sizes(sizes, dtype):
    """Several blocks of channels, filters and windows; and one of each."""
    batch, channels, out, height, width = sizes
    kernel = (min(3, height), min(3, width))
    weight = noise(out, channels, *kernel, seed=1) / np.sqrt(channels * math.prod(kernel))
    op, theirs = partial(F.conv2d, padding=1), partial(TF.conv2d, padding=1)
    inputs = [noise(batch, channels, height, width), weight, noise(out, seed=2)]
    same_as_torch(op, theirs, inputs, dtype, 8)


def test_pointwise_and_depthwise():
    x, w = noise(2, 6, 8, 9), noise(6, 1, 3, 3, seed=1)
    same_as_torch(
        partial(F.conv2d, padding=1, groups=6), partial(TF.conv2d, padding=1, groups=6), [x, w]
    )
    # most elements of x are in no window
    same_as_torch(partial(F.conv2d, stride=2), partial(TF.conv2d, stride=2), [x, w[:, :, :1, :1]
                  .repeat(6, 1)])  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_images(dtype):
    x = fsdpc.zeros(0, 4, 5, 6, dtype=dtype, requires_grad=True)
    w = fsdpc.ones(2, 2, 3, 3, dtype=dtype, requires_grad=True)
    b = fsdpc.ones(2, dtype=dtype, requires_grad=True)
    y = F.conv2d(x, w, b, padding=1, groups=2)
    assert y.shape == (0, 2, 5, 6)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not values(w.grad).any() and not values(b.grad).any()
    for pool in (F.max_pool2d, F.avg_pool2d):
        z = pool(x, 2)
        assert z.shape == (0, 4, 2, 3)
        z.sum().backward()


def test_parts_and_turned_images():
    """What is a view elsewhere, or here, whose memory begins inside another's."""
    a, w = noise(3, 4, 7, 6), noise(5, 6, 3, 2, seed=1)
    for ours, theirs in (
        (lambda x, w: F.conv2d(x[1:].transpose(1, 3), w),
         lambda x, w: TF.conv2d(x[1:].transpose(1, 3), w)),
        (lambda x, w: F.conv2d(x[2:, :, 1:, ::2].repeat(1, 2, 1, 1)[:, :6], w, stride=2),
         lambda x, w: TF.conv2d(x[2:, :, 1:, ::2].repeat(1, 2, 1, 1)[:, :6], w, stride=2)),
        (lambda x, w: F.max_pool2d(x[1:].transpose(2, 3), 3, 2, 1) + w.sum(),
         lambda x, w: TF.max_pool2d(x[1:].mT, 3, 2, 1) + w.sum()),
    ):  # fmt: skip
        same_as_torch(ours, theirs, [a, w])


def test_gradients_add_up():
    """Into one that is there, as in a second micro-step."""
    x, w = fsdpc.ones(2, 1, 3, 3), fsdpc.ones(2, 1, 2, 2, requires_grad=True)
    for times in (1, 2):
        F.conv2d(x, w).sum().backward()
        assert set(w.grad.reshape(-1).tolist()) == {8.0 * times}


def test_windows_are_not_stored():
    x, w = fsdpc.randn(32, 8, 64, 64), fsdpc.randn(8, 8, 5, 5)
    x_bytes = x.numel() * 4
    x.requires_grad = w.requires_grad = True
    before = _core.memory_stats()["activation_bytes"]
    y = F.conv2d(x, w, padding=2)
    assert _core.memory_stats()["activation_bytes"] - before == x_bytes  # y's
    dy, before = y.detach(), _core.memory_stats()["total_bytes"]
    _core.reset_peak_memory_stats()
    y.backward(dy)
    peak = _core.memory_stats()["total_peak_bytes"] - before
    assert peak < 3 * x_bytes  # the gradient and a workspace, no 25 copies


def test_bits_do_not_depend_on_threads():
    x, w = fsdpc.randn(3, 20, 33, 17, seed=1), fsdpc.randn(16, 10, 3, 3, seed=2)
    before, results = _core.num_threads(), []
    try:
        for threads in (1, 2, 3):
            _core.set_num_threads(threads)
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            c = fsdpc.zeros(16, requires_grad=True)
            y = F.conv2d(a, b, c, stride=(2, 1), padding=1, groups=2)
            z = F.max_pool2d(y, 3, 2, 1) + F.avg_pool2d(y, 3, 2, 1)
            (z * z).sum().backward()
            results.append((z, a.grad, b.grad, c.grad))
    finally:
        _core.set_num_threads(before)
    for other in results[1:]:
        assert all(_core.array_equal(p, q) for p, q in zip(results[0], other, strict=True))


@pytest.mark.parametrize("options", [{}, {"stride": 3, "padding": 2, "dilation": 2, "groups": 2}])
def test_conv1d(options):
    inputs = [noise(2, 4, 9), noise(6, 4 // options.get("groups", 1), 3, seed=1), noise(6, seed=2)]
    op, theirs = partial(F.conv1d, **options), partial(TF.conv1d, **options)
    same_as_torch(op, theirs, inputs, "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options", [(2,), (3, 1, 1), (3, 2, 1), ((2, 3), (1, 2), (1, 0)), ((1, 4), (3, 5))], ids=str
)
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
    for width in (2, 40):  # one window, and a vector of them
        for place in range(2 * width):
            a = np.arange(2.0 * width).reshape(1, 1, 2, width)
            a.reshape(-1)[place] = math.nan
            want = np.zeros(width // 2, dtype=bool)
            want[place % width // 2] = True
            assert (np.isnan(F.max_pool2d(fsdpc.tensor(a), 2).numpy())[0, 0, 0] == want).all()


def test_padding_beyond_the_kernel():
    """PyTorch refuses it; here windows without elements are -inf, or zero."""
    x = fsdpc.ones(1, 1, 1, 1, requires_grad=True)
    lowest = -math.inf
    y = F.max_pool2d(x, 1, 1, 1)
    assert y.tolist() == [[[[lowest] * 3, [lowest, 1.0, lowest], [lowest] * 3]]]
    y.backward(fsdpc.ones(1, 1, 3, 3))
    assert x.grad.item() == 1.0
    assert F.avg_pool2d(x, 1, 2, 2).tolist() == [[[[0.0] * 3, [0.0, 1.0, 0.0], [0.0] * 3]]]


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


def test_errors_name_the_operation_that_was_called():
    row, image = fsdpc.zeros(1, 2, 5), fsdpc.zeros(1, 2, 5, 5)
    for call, text in (
        (lambda: F.conv1d(row, fsdpc.zeros(3, 1, 2)), r"conv1d: x has 2 .* \(3, 1, 2\)"),
        (lambda: F.conv1d(row, fsdpc.zeros(3, 2, 7)), r"conv1d: no window of \(7,\) .* \(5,\)"),
        (lambda: F.conv1d(row, fsdpc.zeros(3, 2, 2), fsdpc.zeros(2)), r"conv1d: bias \(2,\)"),
        (lambda: F.max_pool1d(row, 7), r"max_pool1d: no window of \(7,\)"),
        (lambda: F.avg_pool1d(image, 2), "avg_pool1d: x has shape"),
        (lambda: F.max_pool2d(row, 2), "max_pool2d: windows of"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="conv1d: dtypes float32, float64"):
        F.conv1d(row, fsdpc.zeros(3, 2, 2, dtype="float64"))
