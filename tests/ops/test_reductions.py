"""Extrema, any and all, variance, norms, cumulative sums, beside NumPy and torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from beside import same_as_torch
from oracle import FLOATS, assert_close, values

import fsdpc

F = fsdpc.functional
CASES = {
    "max": (lambda x: x.max(), lambda x: x.max()),
    "max dim": (lambda x: x.max(1).values, lambda x: x.max(1).values),
    "min kept": (lambda x: x.min(-1, True).values, lambda x: x.min(-1, True).values),
    "amax": (lambda x: x.amax((0, 2)), lambda x: x.amax((0, 2))),
    "amin": (lambda x: x.amin(keepdim=True), lambda x: x.amin((0, 1, 2), keepdim=True)),
    "var": (lambda x: x.var(), lambda x: x.var()),
    "var dims": (lambda x: x.var((0, 2), 0, True), lambda x: x.var((0, 2), correction=0,
                                                                  keepdim=True)),
    "std": (lambda x: x.std(1), lambda x: x.std(1)),
    "norm": (lambda x: x.norm(), lambda x: x.norm()),
    "norm 1": (lambda x: x.norm(1, 0), lambda x: x.norm(1, 0)),
    "norm 3": (lambda x: x.norm(3, (1, 2), True), lambda x: x.norm(3, (1, 2), True)),
    "norm inf": (lambda x: x.norm(math.inf, 2), lambda x: x.norm(math.inf, 2)),
    "cumsum": (lambda x: x.cumsum(0), lambda x: x.cumsum(0)),
    "cumsum last": (lambda x: x.cumsum(-1), lambda x: x.cumsum(-1)),
    "logsumexp": (lambda x: x.logsumexp(1), lambda x: x.logsumexp(1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES)
def test_beside_torch(name, dtype):
    op, theirs = CASES[name]
    for shape in [(3, 7, 4), (1, 1, 1) if "var" not in name and "std" not in name else (2, 2, 1)]:
        x = np.random.default_rng(3).permutation(math.prod(shape)).reshape(shape) / 8 - 2.03
        same_as_torch(op, theirs, [x], dtype, 3, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "int64", "uint8"])
def test_where_extrema_are(dtype):
    a = np.random.default_rng(1).integers(0, 5, (4, 6, 3))  # equals: the first is found
    x = fsdpc.tensor(a).to(dtype)
    for axis in (None, 0, 1, -1):
        assert x.argmax(axis).tolist() == np.argmax(a, axis).tolist()
        assert x.argmin(axis, True).tolist() == np.argmin(a, axis, keepdims=True).tolist()
    found = x.max(1)
    assert found.values.dtype is x.dtype and found.values.tolist() == a.max(1).tolist()
    assert found.indices.dtype is fsdpc.int64 and x.max().item() == a.max()


def test_the_gradient_of_a_maximum_goes_to_one_element():
    x = fsdpc.tensor([1.0, 3.0, 3.0], requires_grad=True)
    x.max().backward()
    assert x.grad.tolist() == [0.0, 1.0, 0.0]
    nan = fsdpc.tensor([1.0, math.nan, 3.0])
    assert math.isnan(nan.max().item()) and nan.argmax().item() == 1


def test_any_and_all():
    a = np.array([[0.0, 2.0, math.nan], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    for x in (fsdpc.tensor(a), fsdpc.tensor(a).to("bfloat16"), fsdpc.tensor(a != 0)):
        for axis in (None, 0, 1, (0, 1)):
            assert x.any(axis).tolist() == a.any(axis).tolist()
            assert x.all(axis, True).tolist() == a.all(axis, keepdims=True).tolist()
    empty = fsdpc.zeros(0, 3)
    assert empty.all(0).tolist() == [True] * 3 and empty.any(0).tolist() == [False] * 3


def test_sums_of_integers():
    a = np.random.default_rng(1).integers(-9, 9, (5, 4))
    for dtype in ("int32", "int64"):
        x = fsdpc.tensor(a).to(dtype)
        assert x.sum(0).tolist() == a.sum(0).tolist() and x.sum().dtype is fsdpc.int64
        assert x.cumsum(1).tolist() == a.cumsum(1).tolist() and x.cumsum(1).dtype is fsdpc.int64
    assert fsdpc.tensor(a > 0).cumsum(0).tolist() == (a > 0).cumsum(0).tolist()


@pytest.mark.parametrize("dims", [None, 0, 1, 2, (0, 2), (1, 2), (0, 1, 2)])
def test_sums_of_large_integers_are_exact(dims):
    """Beyond what float64 holds, and around 64 bits as NumPy's."""
    a = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, (7, 300, 9))
    for x in (a, np.abs(a) // a.size):
        with np.errstate(over="ignore"):
            want = x.sum(axis=dims)
        assert np.array_equal(fsdpc.tensor(x).sum(dims).numpy(), want)
    ones = fsdpc.tensor(np.array([2**53, 1, 1]))
    assert ones.sum().item() == 2**53 + 2 and ones.to("int32").sum().dtype is fsdpc.int64
    assert fsdpc.zeros(0, 3, dtype="int64").sum(0).tolist() == [0] * 3


def test_norms_of_zeros_have_a_gradient_of_zero():
    for p in (1, 2, 3, math.inf):
        x = fsdpc.zeros(4, requires_grad=True)
        x.norm(p).backward()
        assert x.grad.tolist() == [0.0] * 4


def test_long_sums_do_not_lose_digits():
    x = np.random.default_rng(2).random(4099).astype(np.float32)
    want = np.cumsum(x.astype(np.float64))
    assert np.max(np.abs(fsdpc.tensor(x).cumsum(0).numpy() - want) / want) < 1e-6
    halves = fsdpc.tensor(x).to("bfloat16")
    exact = np.cumsum(halves.to("float64").numpy())
    assert np.max(np.abs(halves.cumsum(0).to("float64").numpy() - exact) / exact) < 2**-8


def test_what_is_refused():
    x = fsdpc.zeros(2, 3)
    with pytest.raises(IndexError, match="max: dimension 2 of a tensor with 2 dimensions"):
        x.max(2)
    with pytest.raises(ValueError, match="argmin: there is no element among shape"):
        fsdpc.zeros(0).min()
    with pytest.raises(ValueError, match="norm: p is 0"):
        x.norm(0)
    assert math.isnan(fsdpc.ones(1).var().item())
    assert fsdpc.zeros(3, 0).cumsum(1).shape == (3, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "row",
    [[-3e4, 0, 0], [-5e4, 1, 2], [-math.inf, 0, 1], [0, -math.inf, -math.inf], [1e3, 1e3, 1e3]],
)
def test_logsumexp_is_exact_whatever_comes_first(row, dtype):
    x, theirs = fsdpc.tensor([row] * 2).to(dtype), torch.tensor([row] * 2, dtype=torch.float64)
    x.requires_grad_(), theirs.requires_grad_()
    ours, want = F.logsumexp(x, 1), torch.logsumexp(theirs, 1)
    assert_close(values(ours), want.detach().numpy(), dtype, 1, "logsumexp")
    ours.sum().backward()
    want.sum().backward()
    assert_close(values(x.grad), theirs.grad.numpy(), dtype, 1, "gradient")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cols", [3, 2500])  # a row whose exponents are kept, and one that is long
def test_gradients_of_logsumexp_beside_infinity(cols, dtype):
    """As in torch: NaN where the infinity is, 0 next to it."""
    rows = [[1.0] * cols for _ in range(4)]
    rows[0][1], rows[1][-1], rows[2][0], rows[2][1] = math.inf, -math.inf, math.inf, -math.inf
    x = fsdpc.tensor(rows, dtype=dtype, requires_grad=True)
    y = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    F.logsumexp(x, 1).sum().backward()
    torch.logsumexp(y, 1).sum().backward()
    np.testing.assert_allclose(values(x.grad), y.grad.numpy(), rtol=0.01)


def test_logsumexp_of_what_is_special():
    inf, nan = math.inf, math.nan
    assert F.logsumexp(fsdpc.tensor([-1e9, 0.0, 0.0]), 0).item() == pytest.approx(math.log(2))
    rows = fsdpc.tensor([[-inf, -inf], [inf, 0.0], [inf, -inf], [nan, inf], [-inf, nan]])
    for x in (rows, rows.double(), rows.half()):
        got = F.logsumexp(x, 1).tolist()
        assert got[:3] == [-inf, inf, inf] and np.isnan(got[3:]).all()
    assert F.logsumexp(fsdpc.zeros(2, 0), 1).tolist() == [-inf, -inf]
    assert F.logsumexp(fsdpc.zeros(2, 0), 0, True).shape == (1, 0)
    assert F.logsumexp(fsdpc.zeros(2, 3, 4), 1).shape == (2, 4)
    assert F.logsumexp(fsdpc.tensor(3.0), -1).item() == 3
    with pytest.raises(IndexError, match="logsumexp: dimension 2 of a tensor with 2 dimensions"):
        F.logsumexp(rows, 2)


def test_variances_of_equal_elements():
    x = fsdpc.full((2, 3), 2.5, requires_grad=True)
    x.std(1).sum().backward()
    assert x.grad.tolist() == [[0.0] * 3] * 2
    assert fsdpc.tensor([1.0, 3.0]).var(correction=2).item() == math.inf
    assert math.isnan(fsdpc.tensor([1.0, 1.0]).var(correction=2).item())
    assert fsdpc.ones(2, 3).var(np.int64(0)).shape == (3,)


def test_dimensions_are_named_once():
    for op in (F.sum, F.mean, F.any, F.var, F.amax, F.amin):
        with pytest.raises(ValueError, match="dimension 0 is named twice"):
            op(fsdpc.ones(2, 3), (0, -2))


ALONG = {
    "max": lambda x, d: x.max(d),
    "min kept": lambda x, d: x.min(d, True),
    "amax": lambda x, d: x.amax(d),
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d),
    "var": lambda x, d: x.var(d, correction=0),
    "norm": lambda x, d: x.norm(2, d),
    "cumsum": lambda x, d: x.cumsum(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "sort": lambda x, d: x.sort(d),
    "topk": lambda x, d: x.topk(1, d),
    "flip": lambda x, d: x.flip((d,)),
    "squeeze": lambda x, d: x.squeeze(d),
    "transpose": lambda x, d: x.transpose(d, 0),
}
INDICES = {
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, True),
    "argsort": lambda x, d: x.argsort(d),
    "any": lambda x, d: x.any(d),
    "all": lambda x, d: x.all(d),
}


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", [*ALONG, *INDICES])
def test_a_tensor_without_dimensions_counts_as_one_with_one(name, dim):
    """As in torch; it has no dimension 1."""
    operation = ALONG.get(name) or INDICES[name]
    made = [lib.tensor(3.0, requires_grad=name in ALONG) for lib in (fsdpc, torch)]
    found = [operation(x, dim) for x in made]
    found = [y if isinstance(y, tuple) else (y,) for y in found]
    assert [y.tolist() for y in found[0]] == [y.tolist() for y in found[1]]
    assert all(y.shape == () for y in found[0])
    if name in ALONG:
        for y, *_ in found:
            y.backward()
        assert made[0].grad.tolist() == made[1].grad.tolist()
    with pytest.raises(IndexError, match="dimension 1 of a tensor with 0 dimensions"):
        operation(fsdpc.tensor(3.0), 1)


def test_elements_of_a_tensor_without_dimensions():
    for lib, place in ((F, fsdpc), (torch, torch)):
        x, zero = place.tensor(3.0), place.tensor(0)
        assert lib.gather(x, 0, zero).tolist() == 3
        assert lib.scatter_add(x, -1, zero, x).tolist() == 6
        assert lib.index_select(x, 0, place.tensor([0])).tolist() == 3
    x = fsdpc.tensor(3.0)
    for refused in (lambda: F.cat([x, x], 0), lambda: F.roll(x, 1, 0), lambda: x.topk(2, 0),
                    lambda: F.split(x, 1, 0)):  # fmt: skip
        with pytest.raises((IndexError, ValueError), match="dimensions"):
            refused()
