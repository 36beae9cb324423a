"""Linear cross entropy, which computes logits in chunks, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracle import FLOATS, TOLERANCE, check, values

from fsdpc import _core
from fsdpc import functional as F

MIB = 1 << 20
TARGETS = np.array([[3, 0, -100, 5], [1, -100, 2, 2]])
# The loss is fp32 whatever the operands are, which bounds float64.
LOSS_SCALE = {"float64": TOLERANCE["float32"] / TOLERANCE["float64"]}


def noise(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


def reference(x, w, reduction="mean", label_smoothing=0.0, softcap=0.0, z_loss=0.0):
    """The definition, over all logits."""
    logits = x.reshape(-1, x.shape[-1]) @ w.T
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    targets = TARGETS.ravel()
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    at = logits[np.arange(len(targets)), targets % len(w)]
    rows = lse - (1 - label_smoothing) * at - label_smoothing * logits.mean(-1) + z_loss * lse**2
    rows = np.where(targets == -100, 0.0, rows)
    if reduction == "none":
        return rows.reshape(TARGETS.shape)
    return rows.sum() / (1 if reduction == "sum" else (targets != -100).sum())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk_rows", [0, 1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.2}, {"softcap": 2.0}, {"z_loss": 0.1},
     {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01}],
    ids=lambda o: "-".join(o) or "plain",
)  # fmt: skip
def test_values_and_gradients(options, reduction, chunk_rows, dtype):
    scale = (12 if "softcap" in options else 6) * LOSS_SCALE.get(dtype, 1)
    for wrt in ([0, 1], [0], [1]):
        check(
            lambda x, w: F.linear_cross_entropy(
                x, w, _core.tensor(TARGETS), chunk_rows=chunk_rows, reduction=reduction, **options
            ),
            lambda x, w: reference(x, w, reduction, **options),
            [noise((2, 4, 5), 1), noise((6, 5), 2)], dtype, scale=scale, wrt=wrt,
        )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_rows", [0, 3])
def test_it_scales_and_repeats(chunk_rows, reduction):
    x = _core.tensor(noise((8, 5), 1), dtype="float32", requires_grad=True)
    w = _core.tensor(noise((6, 5), 2), dtype="float32", requires_grad=True)
    ids = _core.tensor(TARGETS.ravel())
    each = _core.tensor(noise(8, 3), dtype="float32") if reduction == "none" else 3
    loss = F.linear_cross_entropy(x, w, ids, chunk_rows=chunk_rows, reduction=reduction) * each
    loss = loss.sum()
    loss.backward(retain_graph=True)
    once = [values(x.grad), values(w.grad)]
    loss.backward()
    for t, before in zip((x, w), once, strict=True):
        np.testing.assert_allclose(values(t.grad), 2 * before, rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()
    plain_x, plain_w = x.detach().requires_grad_(), w.detach().requires_grad_()
    (F.cross_entropy(F.linear(plain_x, plain_w), ids, reduction=reduction) * each).sum().backward()
    np.testing.assert_allclose(once[0], values(plain_x.grad), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(once[1], values(plain_w.grad), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_rows", [0, 1])
def test_a_weight_used_elsewhere_too(chunk_rows):
    """Gradients that forward kept are added to others: tied embeddings."""
    w = _core.tensor(noise((6, 5), 2), dtype="float32", requires_grad=True)
    x = F.embedding(_core.tensor([0, 4, 4, 1]), w)
    loss = F.linear_cross_entropy(x, w, _core.tensor([1, 2, 3, 3]), chunk_rows=chunk_rows)
    (loss + (w * w).sum()).backward()
    plain = w.detach().requires_grad_()
    x = F.embedding(_core.tensor([0, 4, 4, 1]), plain)
    loss = F.cross_entropy(F.linear(x, plain), _core.tensor([1, 2, 3, 3]))
    (loss + (plain * plain).sum()).backward()
    np.testing.assert_allclose(values(w.grad), values(plain.grad), rtol=1e-5, atol=1e-6)


def test_of_nothing():
    x, w = _core.zeros(0, 5, requires_grad=True), _core.zeros(6, 5, requires_grad=True)
    for reduction, want in ("mean", math.nan), ("sum", 0.0):
        loss = F.linear_cross_entropy(x, w, _core.zeros(0, dtype="int64"), reduction=reduction)
        np.testing.assert_equal(loss.item(), want)
        loss.backward()
    assert x.grad.shape == (0, 5) and w.grad.tolist() == [[0.0] * 5] * 6
    none = F.linear_cross_entropy(x, w, _core.zeros(0, dtype="int64"), reduction="none")
    assert none.shape == (0,)
    y = _core.ones(2, 5, requires_grad=True)
    for chunk_rows in (0, 1):
        loss = F.linear_cross_entropy(y, w, _core.tensor([-100, -100]), chunk_rows=chunk_rows)
        assert math.isnan(loss.item())
        loss.backward()
    assert values(y.grad).tolist() == [[0.0] * 5] * 2


def test_nan_reaches_the_loss_and_the_gradients():
    for reduction in ("mean", "sum", "none"):
        x = _core.tensor([[math.nan, 1.0], [1.0, 2.0]], requires_grad=True)
        w = _core.ones(3, 2, requires_grad=True)
        loss = F.linear_cross_entropy(x, w, _core.tensor([1, 2]), reduction=reduction, softcap=5.0)
        assert math.isnan(loss.sum().item())
        loss.sum().backward()
        assert np.isnan(values(w.grad)).all() and np.isnan(values(x.grad)[0]).all()


@pytest.mark.parametrize(
    "options, text",
    [({"reduction": "max"}, "reduction is 'max'"),
     ({"label_smoothing": 1.0}, "label_smoothing is 1"),
     ({"softcap": -1.0}, "softcap is -1"), ({"z_loss": math.inf}, "z_loss is inf"),
     ({"label_smoothing": math.nan}, "label_smoothing is nan")],
)  # fmt: skip
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=text):
        F.linear_cross_entropy(_core.ones(2, 3), _core.ones(4, 3), _core.tensor([0, 1]), **options)


@pytest.mark.parametrize(
    "rows, classes, dtype, chunk",
    [(2048, 32000, "float32", 196), (2048, 32000, "bfloat16", 393), (4096, 128256, "float32", 64),
     (100, 1000, "float32", 100)],
)  # fmt: skip
def test_chunks_on_a_cpu(rows, classes, dtype, chunk):
    """24 MiB of logits, or 64 rows."""
    def forward():
        x, w = _core.empty(rows, 1, dtype=dtype), _core.empty(classes, 1, dtype=dtype)
        F.linear_cross_entropy(x, w, _core.empty(rows, dtype="int64"))

    peak, _, _ = _core.dry_run([], [], [], forward)
    size = 4 if dtype == "float32" else 2
    others = (rows + classes) * size + rows * 8 + chunk * 4
    assert 0 <= peak - chunk * classes * size - others < 4096


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_beyond_the_gradients(reduction, dtype):
    """At most 32 MiB beyond the gradient of x and one gradient of the weight, in fp32."""
    rows, width, classes = 2048, 256, 32000
    x = _core.zeros(rows, width).to(dtype).detach().requires_grad_()
    w = _core.zeros(classes, width).to(dtype).detach().requires_grad_()
    ids = _core.zeros(rows, dtype="int64")
    _core.reset_peak_memory_stats()
    before = _core.memory_stats()["activation_bytes"]
    F.linear_cross_entropy(x, w, ids, reduction=reduction).sum().backward()
    grown = _core.memory_stats()["activation_peak_bytes"] - before
    given = (x.numel() + w.numel()) * x.dtype.itemsize  # x.grad and w.grad
    fp32 = 0 if dtype == "float32" else w.numel() * 4
    assert grown <= given + fp32 + 32 * MIB, grown / MIB
