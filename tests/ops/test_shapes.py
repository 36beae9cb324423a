"""Reshape, permute, expand, slices, concat, stack, sums, means, softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracle import FLOATS, check, values

from fsdpc import _core
from fsdpc import functional as F


def _inputs(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


# name: (operation, reference, shape of the input)
MOVES = {
    "reshape": (lambda x: x.reshape(3, -1), lambda x: x.reshape(3, -1), (2, 3, 5)),
    "reshape of nothing": (lambda x: x.reshape(0, 7), lambda x: x.reshape(0, 7), (3, 0)),
    "view to 0-D": (lambda x: x.view(()), lambda x: x.reshape(()), (1, 1)),
    "flatten": (lambda x: x.flatten(1), lambda x: x.reshape(2, 15), (2, 3, 5)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), lambda x: x[..., None], (2, 3)),
    "squeeze": (lambda x: x.squeeze(1), lambda x: x[:, 0], (2, 1, 3)),
    "transpose": (lambda x: x.transpose(0, -1), lambda x: x.swapaxes(0, -1), (2, 3, 5)),
    "T": (lambda x: x.T, lambda x: x.T, (7, 4)),
    "permute": (lambda x: x.permute(2, 0, 1), lambda x: x.transpose(2, 0, 1), (2, 3, 5)),
    "permute of four": (
        lambda x: x.permute(0, 2, 1, 3), lambda x: x.transpose(0, 2, 1, 3), (2, 3, 4, 5),
    ),
    "permute of nothing": (lambda x: x.permute(1, 0), lambda x: x.T, (0, 3)),
    "expand": (lambda x: x.expand(4, 3, 5), lambda x: np.broadcast_to(x, (4, 3, 5)), (3, 1)),
    "expand 0-D": (lambda x: x.expand(3), lambda x: np.broadcast_to(x, (3,)), ()),
    "rows": (lambda x: x[1:3], lambda x: x[1:3], (5, 4)),
    "one row": (lambda x: x[-1], lambda x: x[-1], (5, 4)),
    "columns": (lambda x: x[:, 1:3], lambda x: x[:, 1:3], (5, 4)),
    "one column": (lambda x: x[:, 2], lambda x: x[:, 2], (5, 4)),
    "one element": (lambda x: x[2, 3], lambda x: x[2, 3], (5, 4)),
    "steps": (lambda x: x[::2, 1::3], lambda x: x[::2, 1::3], (5, 7)),
    "ellipsis": (lambda x: x[..., 0], lambda x: x[..., 0], (2, 3, 4)),
    "ellipsis inside": (lambda x: x[1, ..., 1:], lambda x: x[1, ..., 1:], (2, 3, 4)),
    "new dimension": (lambda x: x[:, None, 1], lambda x: x[:, None, 1], (2, 3)),
    "empty slice": (lambda x: x[3:1], lambda x: x[3:1], (5, 4)),
    "middle": (lambda x: x[0:1, 2:4], lambda x: x[0:1, 2:4], (3, 6, 2)),
    "clone": (lambda x: x.clone(), lambda x: x, (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", MOVES)
def test_moves(name, dtype):
    op, reference, shape = MOVES[name]
    check(op, reference, [_inputs(shape)], dtype, what=name)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_moves_of_integers(dtype):
    data = np.arange(24).reshape(2, 3, 4).astype(dtype)
    x = _core.tensor(data)
    assert x.permute(2, 0, 1).tolist() == data.transpose(2, 0, 1).tolist()
    assert x[1, :, ::2].tolist() == data[1, :, ::2].tolist()
    assert F.concat([x, x], 1).tolist() == np.concatenate([data, data], 1).tolist()


def test_large_moves():
    check(lambda x: x.permute(1, 0), np.transpose, [_inputs((301, 257))], "float32")
    check(lambda x: x[:, 5:250:3], lambda x: x[:, 5:250:3], [_inputs((301, 257))], "float32")


def test_leading_rows_share_memory_and_others_do_not():
    x = _core.zeros(4, 3)
    x[1:3].fill_(7)
    assert x.tolist() == [[0.0] * 3, [7.0] * 3, [7.0] * 3, [0.0] * 3]
    x[:, 1:2].clone().fill_(9)
    columns = x[:, 1]
    columns.fill_(9)
    assert x.tolist()[1] == [7.0] * 3


def test_parts_of_one_tensor_add_into_one_gradient():
    x = _core.tensor(_inputs((3, 12)), dtype="float32", requires_grad=True)
    a, b, c = F.split(x, [2, 4, 6], dim=1)
    (a.sum() + 2 * b.sum() + 3 * c.sum() + 5 * x[:, 3].sum()).backward()
    want = np.ones((3, 12))
    want[:, 2:6], want[:, 6:] = 2, 3
    want[:, 3] += 5
    assert x.grad.tolist() == want.tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concat(dtype, dim):
    shapes = [[2, 3, 2], [2, 3, 2], [2, 3, 2], [2, 3, 2], [2, 3, 2], [2, 3, 2]]
    for i, extent in enumerate((1, 0, 5, 2, 3, 1)):
        shapes[i][dim] = extent
    inputs = [_inputs(s, i) for i, s in enumerate(shapes)]
    check(
        lambda *xs: F.concat(xs, dim), lambda *xs: np.concatenate(xs, dim), inputs, dtype,
        what="concat",
    )  # fmt: skip
    check(lambda *xs: F.concat(xs, dim), lambda *xs: np.concatenate(xs, dim), inputs, dtype,
          wrt=[2])  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_stack(dim):
    inputs = [_inputs((2, 3), i) for i in range(3)]
    check(lambda *xs: F.stack(xs, dim), lambda *xs: np.stack(xs, dim), inputs, "float32")


REDUCTIONS = [
    (None, False), (None, True), (0, False), (1, True), (-1, False), ((0, 2), False),
    ((0, 1, 2), True), ((1, 2), True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_reductions(name, dtype):
    for shape in [(2, 3, 5), (1, 1, 1), (7, 1, 33)]:
        for dim, keepdim in REDUCTIONS:
            check(
                lambda x, d=dim, k=keepdim: getattr(F, name)(x, d, k),
                lambda x, d=dim, k=keepdim: getattr(np, name)(x, axis=d, keepdims=k),
                [_inputs(shape)], dtype, scale=4, what=f"{name} {shape} {dim}",
            )  # fmt: skip


def test_reductions_of_nothing():
    assert F.sum(_core.zeros(0, 3)).item() == 0.0
    assert F.sum(_core.zeros(0, 3), 0).tolist() == [0.0] * 3
    assert F.sum(_core.zeros(0, 3), 1).shape == (0,)
    assert math.isnan(F.mean(_core.zeros(0)).item())
    x = _core.zeros(0, 3, requires_grad=True)
    x.sum().backward()
    assert x.grad.shape == (0, 3)


def test_large_reductions():
    x = _inputs((501, 403))
    for dim in (None, 0, 1):
        # sums of hundreds of thousands: fp32's error grows with the root of the count
        check(lambda x, d=dim: x.sum(d), lambda x, d=dim: x.sum(axis=d), [x], "float32", scale=30)


def _softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 1), (4, 7), (2, 3, 33)])
def test_softmax(shape, dtype):
    x = 3 * _inputs(shape)
    check(F.softmax, _softmax, [x], dtype, scale=2, what="softmax")
    check(F.log_softmax, lambda x: np.log(_softmax(x)), [x], dtype, scale=3, what="log_softmax")


def test_softmax_over_other_dimensions_and_nothing():
    for dim in (0, 1):
        check(lambda x, d=dim: F.softmax(x, d), lambda x, d=dim: _softmax(x, d),
              [_inputs((4, 5, 3))], "float32", scale=2)  # fmt: skip
    assert F.softmax(_core.zeros(0, 3)).shape == (0, 3)
    assert F.softmax(_core.zeros(3, 0)).shape == (3, 0)
    assert F.softmax(_core.tensor(5.0)).item() == 1.0
    assert F.softmax(_core.tensor([1000.0, 0.0])).tolist() == [1.0, 0.0]
    assert F.softmax(_core.tensor([-math.inf, 0.0])).tolist() == [0.0, 1.0]
    big = F.log_softmax(_core.tensor(_inputs((3, 40_000)), dtype="float32"))
    np.testing.assert_allclose(np.exp(values(big)).sum(-1), 1.0, atol=1e-5)


def test_errors():
    x = _core.zeros(2, 3)
    with pytest.raises(ValueError, match=r"reshape: .*\(2, 3\).*\(4, 2\)"):
        x.reshape(4, 2)
    with pytest.raises(ValueError, match="reshape: extent -1; one extent may be -1"):
        x.reshape(-1, -1)
    with pytest.raises(ValueError, match=r"expand: .*\(2, 3\).*\(2, 4\)"):
        x.expand(2, 4)
    with pytest.raises(ValueError, match=r"concat: .*\(2, 3\).*\(3, 2\)"):
        F.concat([x, x.T])
    with pytest.raises(TypeError, match="float32 and another is bfloat16"):
        F.concat([x, x.bfloat16()])
    with pytest.raises(ValueError, match="no tensors"):
        F.concat([])
    with pytest.raises(ValueError, match="named twice"):
        x.permute(0, 0)
    with pytest.raises(IndexError, match="dimension 2"):
        x.transpose(0, 2)
    with pytest.raises(IndexError, match="dimension 2"):
        x.sum(2)
    with pytest.raises(IndexError, match="index 2 of dimension 0"):
        x[2]
    with pytest.raises(IndexError, match="3 indices"):
        x[0, 0, 0]
    with pytest.raises(ValueError, match="step"):
        x[::-1]
    with pytest.raises(TypeError, match="indexed by integers"):
        x["0"]
