"""Attention inside documents that share rows, against NumPy in float64."""

import math

import numpy as np
import pytest
from oracle import FLOATS, check, values

import fsdpc
from fsdpc import _core
from fsdpc import functional as F
from fsdpc.data import document_lengths
from fsdpc.models import GPT2, Llama, ModelConfig
from fsdpc.models.attention import attend


def masked(q, k, v, lengths, causal=True, scale=None):
    """(B, H, T, D), with a T x T mask of each row."""
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    batch, _, tokens, dim = q.shape
    of = np.repeat(np.arange(len(lengths)), lengths).reshape(batch, tokens)
    seen = of[:, :, None] == of[:, None, :]
    if causal:
        seen &= np.tri(tokens, dtype=bool)
    scores = q @ k.swapaxes(-1, -2) * (scale or 1 / math.sqrt(dim))
    scores = np.where(seen[:, None], scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


# batch, heads, kv heads, tokens, dim, lengths
CASES = [
    (1, 1, 1, 1, 4, [1]), (1, 2, 2, 5, 8, [2, 3]), (2, 4, 2, 7, 6, [1, 6, 7]),
    (3, 2, 1, 9, 5, [9, 9, 4, 4, 1]), (2, 2, 2, 4, 8, [1] * 8), (1, 2, 1, 150, 16, [70, 1, 79]),
]  # fmt: skip


def inputs_of(case, layout="bhtd"):
    batch, heads, kv, tokens, dim, _ = case
    rng = np.random.default_rng(tokens)
    found = [rng.standard_normal((batch, h, tokens, dim)) for h in (heads, kv, kv)]
    return [x.transpose(0, 2, 1, 3) if layout == "bthd" else x for x in found]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_documents_do_not_see_each_other(case, causal, dtype):
    # probabilities are rounded to bf16 between the two products; lse is kept in fp32
    scale = {"float64": 20, "bfloat16": 4}.get(dtype, 8 if case[3] > 100 else 3)
    check(
        lambda q, k, v: F.varlen_attention(q, k, v, case[-1], causal),
        lambda q, k, v: masked(q, k, v, case[-1], causal), inputs_of(case), dtype, scale=scale,
        what="varlen attention",
    )  # fmt: skip


def test_tokens_first_and_another_scale():
    case = CASES[3]

    def turned(x):
        return x.swapaxes(1, 2)

    check(
        lambda q, k, v: F.varlen_attention(q, k, v, case[-1], scale=0.3, layout="bthd"),
        lambda q, k, v: turned(masked(*map(turned, (q, k, v)), case[-1], scale=0.3)),
        inputs_of(case, "bthd"), "float32", scale=3,
    )  # fmt: skip


def results(op, arrays):
    leaves = [_core.tensor(x.astype(np.float32)) for x in arrays]
    for leaf in leaves:
        leaf.requires_grad = True
    y = op(*leaves)
    (y * y).sum().backward()
    return [values(t) for t in (y, *(leaf.grad for leaf in leaves))]


def test_rows_of_one_document_have_the_bits_of_rows():
    arrays = inputs_of((3, 2, 1, 9, 8, None))
    whole = results(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, True), arrays)
    apart = results(lambda q, k, v: F.varlen_attention(q, k, v, np.array([9, 9, 9])), arrays)
    assert all(np.array_equal(a, b) for a, b in zip(whole, apart))


def test_a_document_has_the_bits_that_it_has_alone():
    arrays = inputs_of((1, 2, 1, 12, 8, None))
    lengths = document_lengths(np.array([[1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1]]), 0)
    assert lengths == [4, 3, 5]
    together = results(lambda q, k, v: F.varlen_attention(q, k, v, lengths), arrays)
    for begin, end in ((0, 4), (4, 7), (7, 12)):
        alone = results(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, True),
            [x[:, :, begin:end] for x in arrays],
        )
        assert all(np.array_equal(a, b[:, :, begin:end]) for a, b in zip(alone, together))


def test_no_tokens_and_no_rows():
    for shape in ((0, 2, 3, 4), (2, 2, 0, 4)):
        x = _core.zeros(*shape)
        assert F.varlen_attention(x, x, x, []).shape == shape


def test_what_does_not_fit_is_named(monkeypatch):
    x = _core.zeros(2, 2, 5, 4)
    for lengths, text in [
        ([5], "1 documents end after 0 tokens of row 1: the lengths of all 2 rows must add up"),
        ([5, 3], "2 documents end after 3 tokens of row 1"),
        ([3, 4, 3], "document 1 has 4 tokens, and 2 are left of its row"),
        ([5, 5, 1], "document 2 has 1 tokens, and 0 are left of its row"),
        ([5, 0, 5], "document 1 has 0 tokens"),
        ([5, -5], "varlen_attention: lengths: number 1 is -5"),
    ]:
        with pytest.raises(ValueError, match=text):
            F.varlen_attention(x, x, x, lengths)
    for lengths in (3, [2.5, 2.5, 5]):
        with pytest.raises(TypeError):
            F.varlen_attention(x, x, x, lengths)
    with pytest.raises(OverflowError):
        F.varlen_attention(x, x, x, [2**70])
    k = _core.zeros(2, 2, 7, 4)
    with pytest.raises(ValueError, match="documents need as many keys as queries"):
        F.varlen_attention(x, k, k, [5, 5])
    with pytest.raises(ValueError, match="varlen_attention: layout is 'bhtd' or 'bthd'"):
        F.varlen_attention(x, x, x, [5, 5], layout="tbhd")
    assert fsdpc.functional.varlen_attention is F.varlen_attention


@pytest.mark.parametrize(("window", "dropout"), [(None, 0.0), (3, 0.0), (None, 1e-9)])
def test_models_attend_to_documents(window, dropout):
    """Fused, in windows too, and one by one where dropout needs weights."""
    arrays = inputs_of((2, 4, 2, 7, 6, None), "bthd")
    lengths = [1, 6, 4, 3]
    together = results(lambda q, k, v: attend(q, k, v, window, dropout, lengths), arrays)
    for row, begin, end in ((0, 0, 1), (0, 1, 7), (1, 0, 4), (1, 4, 7)):
        alone = results(
            lambda q, k, v: attend(q, k, v, window, dropout),
            [x[row : row + 1, begin:end] for x in arrays],
        )
        for a, b in zip(alone, together):
            np.testing.assert_allclose(a, b[row : row + 1, begin:end], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="7 tokens"):
        results(lambda q, k, v: attend(q, k, v, window, dropout, [6, 2, 6]), arrays)


@pytest.mark.parametrize("family", [Llama, GPT2])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_document_in_a_sequence_is_as_it_is_alone(family, recompute):
    fsdpc.manual_seed(0)
    config = ModelConfig(vocab_size=50, dim=32, layers=2, heads=4, inner=48, max_seq=16)
    model = family(config)
    if recompute:
        fsdpc.checkpoint_activations(model.blocks(), "all")
    ids = np.random.default_rng(0).integers(1, 50, (2, 9))
    ids[0, 3] = ids[1, 8] = 0
    lengths = document_lengths(ids, 0)
    assert lengths == [4, 5, 9]
    packed = model(ids, lengths=lengths)
    packed.float().sum().backward()
    got, grads = values(packed), [values(p.grad) for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    alone = [model(part) for part in (ids[:1, :4], ids[:1, 4:], ids[1:])]
    for y in alone:
        y.float().sum().backward()
    joined = np.concatenate([values(y)[0] for y in alone]).reshape(got.shape)
    np.testing.assert_allclose(got, joined, rtol=1e-4, atol=1e-5)
    for ours, p in zip(grads, model.parameters()):
        np.testing.assert_allclose(ours, values(p.grad), rtol=1e-3, atol=1e-3)
    assert np.abs(values(model(ids))[0, 4:] - joined[0, 4:]).max() > 1e-3  # it saw the first
    with pytest.raises(ValueError, match=r"\(2, 9\) tokens|its 9 tokens|to 9 tokens"):
        model(ids, lengths=[9, 8])
