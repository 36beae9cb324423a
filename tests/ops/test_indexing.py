"""Gathering, scattering, sorting, and indices that are arrays, beside NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from beside import noise, same_as_torch
from oracle import FLOATS

import fsdpc

F = fsdpc.functional
IDS = np.random.default_rng(4).integers(0, 5, (4, 3, 2))


def both(a):
    return fsdpc.tensor(a), torch.tensor(a)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_and_scatter_add(dim, dtype):
    ours, theirs = both(np.minimum(IDS, {0: 5, 1: 2, -1: 4}[dim]))
    x, src = noise(6, 3, 5), noise(4, 3, 2, seed=1)
    same_as_torch(lambda x: F.gather(x, dim, ours), lambda x: x.gather(dim, theirs), [x], dtype)
    same_as_torch(
        lambda x, s: F.scatter_add(x, dim, ours, s),
        lambda x, s: x.scatter_add(dim, theirs, s),
        [x, src], dtype, 4,
    )  # fmt: skip
    rows, their_rows = both(np.array([2, 0, 2]))
    same_as_torch(
        lambda x: F.index_select(x, dim, rows), lambda x: x.index_select(dim, their_rows), [x],
        dtype, 2,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16"])
def test_gather_of_any_dtype(dtype):
    a = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 99, (5, 4))
    x, ids = fsdpc.tensor(a).to(dtype), np.array([[3, 0], [1, 1]])
    y = F.gather(x, 1, fsdpc.tensor(ids).to("int32"))
    assert y.dtype is x.dtype
    assert y.to("int64").tolist() == np.take_along_axis(a[:2], ids, 1).tolist()


INDICES = [
    np.array([2, 0, 2]), [1, -1], np.array([[0, 1], [3, -4]]), np.array(2),
    (slice(None), [0, 2]), ([0, 1], [1, 2]), (..., [0, 1]), (None, [3]), (1, [0, 2]),
    ([0, 1], slice(0, 2), [1, 2]), (slice(1, 3), None, [0, 1, 1]), ([0, 1], None, 1),
    np.arange(4) % 2 == 0, (slice(None), np.array([True, False, True])), [],
    np.random.default_rng(0).random((4, 3)) > 0.5, np.zeros((4, 3, 5), dtype=bool),
    np.random.default_rng(0).random((4, 3, 5)) > 0.3,
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_indices_that_are_arrays(index):
    a = noise(4, 3, 5)
    empty = isinstance(index, list) and not index
    want = a[np.array([], dtype=np.int64)] if empty else a[index]
    x = fsdpc.tensor(a, requires_grad=True)
    y = x[index]
    assert y.shape == want.shape and y.tolist() == want.tolist()
    y.backward(fsdpc.ones(*y.shape, dtype="float64"))
    grad, value = np.zeros_like(a), noise(*want.shape, seed=2)
    np.add.at(grad, np.array([], dtype=np.int64) if empty else index, 1.0)
    assert x.grad.tolist() == grad.tolist()
    changed, z = a.copy(), fsdpc.tensor(a)
    changed[np.array([], dtype=np.int64) if empty else index] = value
    z[index] = value
    assert z.tolist() == changed.tolist()
    z[index] = 7
    changed[np.array([], dtype=np.int64) if empty else index] = 7
    assert z.tolist() == changed.tolist()


def test_indices_that_are_tensors():
    a = noise(4, 3)
    x = fsdpc.tensor(a)
    assert x[fsdpc.tensor([3, 1])].tolist() == a[[3, 1]].tolist()
    assert x[x > 0].tolist() == a[a > 0].tolist()
    x[x < 0] = 0
    assert x.tolist() == np.maximum(a, 0).tolist()
    x[fsdpc.tensor([0, 0])] = fsdpc.tensor([[1.0], [2.0]])  # the last stays
    assert x[0].tolist() == [2.0] * 3
    rows = fsdpc.tensor(a)
    rows[[1, 2]] = rows[0:2]  # from itself
    assert rows.tolist() == a[[0, 0, 1, 3]].tolist()
    half = x.to("bfloat16")
    half[[1]] = 0.5
    assert half[1].to("float32").tolist() == [0.5] * 3
    ids = fsdpc.tensor([5, 6, 7])
    ids[[0]] = 2**60 + 1
    assert ids.tolist() == [2**60 + 1, 6, 7]


def test_writes_that_are_refused():
    x = fsdpc.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad in place: do it inside no_grad"):
        x[[0]] = 1
    with fsdpc.no_grad():
        x[[0]] = 1
    assert x.tolist() == [1.0, 0.0, 0.0]
    with pytest.raises(IndexError, match="out of bounds"):
        x[[3]]
    with pytest.raises(IndexError, match="2 indices for a tensor with 1 dimensions"):
        x[[0], [0]]
    with pytest.raises(TypeError, match="arrays of integers or bool, not float64"):
        x[np.array([0.5])]
    with pytest.raises(ValueError, match="broadcast"):
        with fsdpc.no_grad():
            x[[0, 1]] = fsdpc.zeros(3)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sort(dim, descending):
    a = np.random.default_rng(3).integers(0, 4, (5, 6, 3)).astype(np.float64)
    x, t = both(a)
    want = t.sort(dim=dim, descending=descending, stable=True)
    values, indices = x.sort(dim, descending)
    assert values.tolist() == want.values.tolist() and indices.tolist() == want.indices.tolist()
    assert x.argsort(dim, descending).tolist() == want.indices.tolist()


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_equals_keep_their_order(dtype, descending):
    a = np.random.default_rng(3).integers(0, 4, (5, 60)).astype(np.float32)
    t = torch.from_numpy(a).to(getattr(torch, dtype))
    if t.is_floating_point():  # zeros of both signs are equal, NaN is largest of either sign
        t[:, ::7] = -0.0
        t[:, ::9] = np.inf
        t[:, ::11] = np.nan
        t[:, ::13] = -t[:, ::13]
    x = fsdpc.tensor(t.float().numpy()).to(dtype)
    want = t.sort(dim=1, descending=descending, stable=True).indices.tolist()
    assert x.argsort(1, descending).tolist() == want
    assert x.topk(7, 1, descending)[1].tolist() == [row[:7] for row in want]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("kind", ["numbers", "equals", "nans"])
def test_topk_of_rows(kind, largest):
    rng = np.random.default_rng(0)
    for shape, k, dim in (((7, 33), 5, 1), ((7, 33), 5, 0), ((4, 5, 64), 9, -1), ((64,), 63, 0)):
        a = rng.standard_normal(shape).astype(np.float32)
        a = np.round(a) if kind == "equals" else a
        a[rng.random(shape) < (0.05 if kind == "nans" else 0)] = np.nan
        values, indices = F.topk(fsdpc.tensor(a), k, dim, largest)
        want = torch.topk(torch.tensor(a), k, dim, largest).values.numpy()
        assert np.array_equal(values.numpy(), want, equal_nan=True), shape
        taken = np.take_along_axis(a, indices.numpy(), dim)
        assert np.array_equal(taken, want, equal_nan=True), shape
        if kind != "nans":  # equals by place
            order = np.argsort(-a if largest else a, axis=dim, kind="stable")
            assert (indices.numpy() == np.take(order, range(k), axis=dim)).all(), shape


def test_sort_and_topk_have_gradients():
    a = noise(4, 7)
    for dtype in FLOATS:
        same_as_torch(lambda x: x.sort(0)[0], lambda x: x.sort(0).values, [a], dtype)
        same_as_torch(lambda x: x.topk(3)[0], lambda x: x.topk(3).values, [a], dtype)
    x, t = both(a)
    ours, theirs = x.topk(2, 0, False), t.topk(2, 0, False)
    assert ours[0].tolist() == theirs.values.tolist()
    assert ours[1].tolist() == theirs.indices.tolist()
    with pytest.raises(ValueError, match="topk: k is 8 for dimension -1 of 7 elements"):
        x.topk(8)


def test_masks():
    a = noise(3, 4)
    x, mask = fsdpc.tensor(a, requires_grad=True), a > 0
    assert F.nonzero(x).tolist() == np.argwhere(a).tolist()
    assert x.masked_select(fsdpc.tensor(mask)).tolist() == a[mask].tolist()
    x.masked_fill(mask, -1.0).sum().backward()
    assert x.grad.tolist() == np.where(mask, 0.0, 1.0).tolist()


def test_indices_that_do_not_fit():
    x = fsdpc.zeros(3, 4)
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            F.gather(x, 1, fsdpc.tensor([[bad]]))
        with pytest.raises(IndexError):
            F.scatter_add(x, 1, fsdpc.tensor([[bad]]), fsdpc.ones(1, 1))
    with pytest.raises(IndexError, match="gather: index 4 for dimension 1 of 4 elements"):
        F.gather(x, 1, fsdpc.tensor([[0, 4]]))
    with pytest.raises(ValueError, match=r"gather: index \(1,\) for a tensor of shape \(3, 4\)"):
        F.gather(x, 1, fsdpc.tensor([0]))
    with pytest.raises(ValueError, match="src .* is smaller than index"):
        F.scatter_add(x, 0, fsdpc.tensor([[0, 0]]), fsdpc.ones(1, 1))
    with pytest.raises(ValueError, match="make it one row"):
        F.index_select(x, 0, fsdpc.tensor([[0]]))
    assert F.gather(fsdpc.zeros(0, 3), 0, fsdpc.zeros(0, 3, dtype="int64")).shape == (0, 3)


class Picking(fsdpc.nn.Module):
    """A model whose index is an activation."""

    def __init__(self):
        super().__init__()
        self.first = fsdpc.nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        index = (y > 0).to("int64")
        return F.gather(y, 1, index).sum() + F.scatter_add(y, 0, index, y).sum()


def test_a_dry_run_takes_no_index_for_wrong():
    model = Picking()
    plan = fsdpc.memory_plan(model, 1, (4, 8))
    assert plan.total > 0 and plan.activation is not None
    model(fsdpc.randn(4, 8)).backward()
    assert model.first.weight.grad is not None
