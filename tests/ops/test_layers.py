"""Norms, embedding, rotary, attention, losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracle import FLOATS, TOLERANCE, check, values

from fsdpc import _core
from fsdpc import functional as F


def _inputs(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- norms ----


def _layer_norm(x, w=1.0, b=0.0, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * w + b


def _rms_norm(x, w=1.0, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 33), (2, 3, 7), (0, 4), (8,)])
def test_norms(shape, dtype):
    # mean and 1/deviation are kept in fp32, which bounds float64's gradient
    scale = 20 if dtype == "float64" else 4
    x, w, b = _inputs(shape, 1), _inputs(shape[-1:], 2), _inputs(shape[-1:], 3)
    if shape[-1] > 1:  # the variance of one element is 0: 1/sqrt(eps) magnifies every rounding
        check(F.layer_norm, _layer_norm, [x, w, b], dtype, scale=scale, what="layer_norm")
        check(F.layer_norm, _layer_norm, [x], dtype, scale=scale, what="layer_norm")
        check(F.layer_norm, _layer_norm, [x, w, b], dtype, scale=scale, wrt=[1])
        check(F.layer_norm, _layer_norm, [x, w, b], dtype, scale=scale, wrt=[2])
    check(F.rms_norm, _rms_norm, [x, w], dtype, scale=scale, what="rms_norm")
    check(F.rms_norm, _rms_norm, [x], dtype, scale=scale, what="rms_norm")
    check(F.rms_norm, _rms_norm, [x, w], dtype, scale=scale, wrt=[0])


def test_norms_large():
    x, w, b = _inputs((301, 320), 1), _inputs((320,), 2), _inputs((320,), 3)
    check(F.layer_norm, _layer_norm, [x, w, b], "float32", scale=8)
    check(F.rms_norm, _rms_norm, [x, w], "float32", scale=8)


# ---- embedding ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ids", [[], [0], [[1, 2, 1], [4, 0, 1]], [3] * 9])
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
def test_embedding(ids, id_dtype, dtype):
    index = np.array(ids, dtype=id_dtype)
    tensor = _core.tensor(index)
    check(
        lambda w: F.embedding(tensor, w), lambda w: w[index], [_inputs((5, 3))], dtype, scale=3,
        what="embedding",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_embedding_with_padding(padding, dtype):
    """The padding's rows are read, and get the gradient of other uses alone."""
    torch = pytest.importorskip("torch")
    from beside import same_as_torch

    ids = np.array([[1, 3, 3], [4, 0, 3]])
    same_as_torch(
        lambda w: F.embedding(_core.tensor(ids), w, padding) * 2 + w[1:2],
        lambda w: torch.nn.functional.embedding(torch.tensor(ids), w, padding) * 2 + w[1:2],
        [_inputs((5, 3))], dtype, 4,
    )  # fmt: skip


def test_embedding_with_padding_that_is_not_finite():
    w = _core.zeros(3, 2, requires_grad=True)
    y = F.embedding(_core.tensor([0, 2]), w, padding_idx=2)
    y.backward(_core.tensor([[1.0, 2.0], [np.inf, np.nan]]))
    assert w.grad.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    for padding in (3, -4):
        with pytest.raises(IndexError, match=f"padding_idx {padding} of 3 rows"):
            F.embedding(_core.tensor([0]), w, padding)


def test_embedding_large_and_out_of_range():
    ids = np.random.default_rng(1).integers(0, 50, (40, 30))
    check(lambda w: F.embedding(_core.tensor(ids), w), lambda w: w[ids], [_inputs((50, 67))],
          "float32", scale=10)  # fmt: skip
    table = _core.zeros(5, 2)
    for bad in (5, -1):
        with pytest.raises(IndexError, match=str(bad)):
            F.embedding(_core.tensor([0, bad]), table)
    with pytest.raises(TypeError, match="ids must be int32 or int64, not float32"):
        F.embedding(_core.zeros(2), table)


# ---- rotary ----


def _rotary(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 5, 3, 8), (1, 0, 2, 4), (2, 3, 1, 34)])
def test_rotary(shape, dtype):
    cos, sin = F.rotary_tables(7, shape[-1])
    check(
        lambda x: F.rotary(x, cos, sin), lambda x: _rotary(x, values(cos), values(sin)),
        [_inputs(shape)], dtype, scale=2, what="rotary",
    )  # fmt: skip


# ---- attention ----


def _attention(q, k, v, causal=False, scale=None):
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores = q @ k.swapaxes(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        tq, tk = scores.shape[-2:]
        scores = np.where(np.tri(tq, tk, tk - tq, dtype=bool), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


# batch, heads, kv heads, queries, keys, dim
ATTENTION = [
    (1, 1, 1, 1, 1, 4), (2, 2, 2, 5, 5, 8), (1, 4, 2, 3, 7, 6), (2, 3, 1, 9, 9, 5),
    (1, 2, 2, 33, 65, 16), (0, 2, 2, 3, 3, 4), (1, 2, 1, 1, 17, 32),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", ATTENTION)
def test_attention(sizes, causal, dtype):
    b, h, hk, tq, tk, d = sizes
    inputs = [_inputs((b, h, tq, d), 1), _inputs((b, hk, tk, d), 2), _inputs((b, hk, tk, d), 3)]
    # probabilities are rounded to bf16 between the two products; lse is kept in fp32
    scale = {"float64": 20, "bfloat16": 4}.get(dtype, 3)
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal),
        lambda q, k, v: _attention(q, k, v, causal), inputs, dtype, scale=scale, what="attention",
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_attention_layouts_agree(causal):
    q, k, v = (_core.randn(2, h, 13, 8, seed=h) for h in (4, 2, 2))
    grads = []
    for layout in ("bhtd", "bthd"):
        leaves = [t.permute(0, 2, 1, 3) if layout == "bthd" else t.clone() for t in (q, k, v)]
        for leaf in leaves:
            leaf.requires_grad = True
        y = F.scaled_dot_product_attention(*leaves, causal=causal, scale=0.3, layout=layout)
        (y * y).sum().backward()
        results = [y, *(leaf.grad for leaf in leaves)]
        grads.append([t.permute(0, 2, 1, 3) if layout == "bthd" else t for t in results])
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(values(a), values(b), rtol=1e-5, atol=1e-6)


def test_attention_large_and_errors():
    inputs = [_inputs((1, 2, 150, 32), 1), _inputs((1, 1, 150, 32), 2), _inputs((1, 1, 150, 32), 3)]
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, True),
        lambda q, k, v: _attention(q, k, v, True), inputs, "float32", scale=8,
    )  # fmt: skip
    q, k = _core.zeros(1, 3, 4, 8), _core.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"\(1, 3, 4, 8\).*\(1, 2, 4, 8\).*multiple"):
        F.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match="layout is 'bhtd' or 'bthd'"):
        F.scaled_dot_product_attention(k, k, k, layout="tbhd")
    with pytest.raises(ValueError, match="at least as many keys"):
        F.scaled_dot_product_attention(k, k[:, :, :2], k[:, :, :2], causal=True)
    with pytest.raises(TypeError, match="q is float32 and k is bfloat16"):
        F.scaled_dot_product_attention(k, k.bfloat16(), k)


# ---- losses ----


def _cross_entropy(x, targets, ignore=-100):
    x = x.reshape(-1, x.shape[-1])
    top = x.max(-1, keepdims=True)
    lse = np.log(np.exp(x - top).sum(-1)) + top[:, 0]
    rows = np.flatnonzero(targets.ravel() != ignore)
    return (lse[rows] - x[rows, targets.ravel()[rows]]).mean()


# The loss is a scalar of fp32 whatever the logits are, which bounds float64.
LOSS_SCALE = {"float64": TOLERANCE["float32"] / TOLERANCE["float64"]}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 33), (2, 3, 7)])
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
def test_cross_entropy(shape, id_dtype, dtype):
    targets = np.random.default_rng(5).integers(0, shape[-1], shape[:-1]).astype(id_dtype)
    ids = _core.tensor(targets)
    check(
        lambda x: F.cross_entropy(x, ids), lambda x: _cross_entropy(x, targets),
        [2 * _inputs(shape)], dtype, scale=2 * LOSS_SCALE.get(dtype, 1), what="cross_entropy",
    )  # fmt: skip


def test_cross_entropy_ignores_rows():
    targets = np.array([1, -100, 0, -100])
    x = 2 * _inputs((4, 9))
    check(lambda x: F.cross_entropy(x, _core.tensor(targets)),
          lambda x: _cross_entropy(x, targets), [x], "float32", scale=2)  # fmt: skip
    check(lambda x: F.cross_entropy(x, _core.tensor([1, 7, 0, 7]), ignore_index=7),
          lambda x: _cross_entropy(x, targets), [x], "float32", scale=2)  # fmt: skip
    leaf = _core.tensor(x, requires_grad=True)
    loss = F.cross_entropy(leaf, _core.tensor([-100] * 4))
    assert math.isnan(loss.item())
    assert math.isnan(F.cross_entropy(_core.zeros(0, 3), _core.zeros(0, dtype="int64")).item())


def test_cross_entropy_large_vocabulary_and_errors():
    targets = np.random.default_rng(5).integers(0, 9001, 17)
    check(lambda x: F.cross_entropy(x, _core.tensor(targets)),
          lambda x: _cross_entropy(x, targets), [2 * _inputs((17, 9001))], "float32", scale=4)
    with pytest.raises(IndexError, match="5"):
        F.cross_entropy(_core.zeros(2, 5), _core.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"logits has shape \(2, 5\) and targets has shape \(3,\)"):
        F.cross_entropy(_core.zeros(2, 5), _core.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match="targets must be int32 or int64"):
        F.cross_entropy(_core.zeros(2, 5), _core.zeros(2))


def test_cross_entropy_keeps_logits_that_others_hold():
    x = _core.tensor(_inputs((3, 4)), dtype="float32", requires_grad=True)
    logits = x * 2
    before = logits.tolist()
    F.cross_entropy(logits, _core.tensor([0, 1, 2])).backward()
    assert logits.tolist() == before
    F.cross_entropy(x * 2, _core.tensor([0, 1, 2])).backward()  # here nobody does
    np.testing.assert_allclose(logits.numpy(), before)
