"""Matmul and linear."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import FLOATS, check, values

from fsdpc import _core
from fsdpc import functional as F


def _inputs(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


MATMUL = [
    ((1, 1), (1, 1)), ((3, 5), (5, 2)), ((0, 5), (5, 2)), ((3, 0), (0, 2)), ((3, 5), (5, 0)),
    ((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 2)), ((2, 3, 5), (5, 4)), ((2, 3, 5), (2, 5, 4)),
    ((2, 3, 4, 5), (2, 3, 5, 2)), ((3, 5), (2, 5, 4)), ((2, 1, 3, 5), (4, 5, 2)), ((2, 3, 5), (5,)),
    ((0, 3, 5), (0, 5, 2)), ((2, 0, 5), (2, 5, 2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("a", "b"), MATMUL)
def test_matmul(a, b, dtype):
    check(F.matmul, np.matmul, [_inputs(a, 1), _inputs(b, 2)], dtype, scale=3, what=f"{a} @ {b}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_large(dtype):
    check(F.matmul, np.matmul, [_inputs((131, 197), 1), _inputs((197, 259), 2)], dtype, scale=8)


def _linear(x, w, b=0.0):
    return x @ w.T + b


LINEAR = [
    ((1, 1), 1), ((3, 5), 7), ((2, 3, 5), 4), ((5,), 3), ((0, 5), 3), ((2, 0), 3), ((2, 5), 0)
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "out"), LINEAR)
def test_linear(shape, out, dtype):
    x, w, b = _inputs(shape, 1), _inputs((out, shape[-1]), 2), _inputs((out,), 3)
    check(F.linear, _linear, [x, w], dtype, scale=3, what="linear")
    check(F.linear, _linear, [x, w, b], dtype, scale=3, what="linear with bias")
    for wrt in ([0], [1], [2]):
        check(F.linear, _linear, [x, w, b], dtype, scale=3, wrt=wrt)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_large(dtype):
    inputs = [_inputs((2, 67, 193), 1), _inputs((301, 193), 2), _inputs((301,), 3)]
    check(F.linear, _linear, inputs, dtype, scale=8)


def _by_columns(fn):
    def with_layout(x, w, b=None):
        return fn(x, w, b, layout="io")

    return with_layout


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "out"), LINEAR)
def test_weights_as_inputs_by_outputs(shape, out, dtype):
    x, w, b = _inputs(shape, 1), _inputs((shape[-1], out), 2), _inputs((out,), 3)
    for fn, after in ((F.linear, lambda y: y), (F.linear_gelu, _gelu)):
        one = _by_columns(fn)
        check(one, lambda x, w, after=after: after(x @ w), [x, w], dtype, scale=4)
        for wrt in (None, [0], [1], [2]):
            check(one, lambda x, w, b, after=after: after(x @ w + b), [x, w, b], dtype, scale=4,
                  wrt=wrt)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_both_layouts_have_the_same_bits(dtype):
    inputs = [_inputs((2, 67, 193), 1), _inputs((301, 193), 2), _inputs((301,), 3),
              _inputs((131, 301), 4)]  # fmt: skip
    results = []
    for layout in ("oi", "io"):
        x, w, b, v = (_core.tensor(i).to(dtype) for i in inputs)
        if layout == "io":
            w, v = w.T, v.T
        for leaf in (x, w, b, v):
            leaf.requires_grad = True
        z = F.linear(F.linear_gelu(x, w, b, layout), v, None, layout)
        z.backward(z.detach())
        turned = [g.T if layout == "io" else g for g in (w.grad, v.grad)]
        results.append([values(t) for t in (z, x.grad, b.grad, *turned)])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "out"), LINEAR)
def test_linear_gelu(shape, out, dtype):
    x, w, b = _inputs(shape, 1), _inputs((out, shape[-1]), 2), _inputs((out,), 3)
    check(F.linear_gelu, lambda x, w: _gelu(_linear(x, w)), [x, w], dtype, scale=4)
    for wrt in (None, [0], [1], [2]):
        check(F.linear_gelu, lambda *a: _gelu(_linear(*a)), [x, w, b], dtype, scale=4, wrt=wrt)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 5)])
def test_a_product_behind_gelu(shape, dtype):
    x, w, b, v = _inputs(shape, 1), _inputs((7, 5), 2), _inputs((7,), 3), _inputs((4, 7), 4)

    def reference(x, w, b, v):
        return _linear(_gelu(_linear(x, w, b)), v)

    def fused(x, w, b, v):
        return F.linear(F.linear_gelu(x, w, b), v)

    for wrt in (None, [0], [1, 2], [3]):
        check(fused, reference, [x, w, b, v], dtype, scale=8, wrt=wrt)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gelu_in_the_product_has_the_bits_of_gelu_behind_it(dtype):
    inputs = [_inputs((2, 67, 193), 1), _inputs((301, 193), 2), _inputs((301,), 3),
              _inputs((131, 301), 4)]  # fmt: skip
    results = []
    for fused in (True, False):
        x, w, b, v = (_core.tensor(i, requires_grad=True).to(dtype).detach() for i in inputs)
        for leaf in (x, w, b, v):
            leaf.requires_grad = True
        y = F.linear_gelu(x, w, b) if fused else F.gelu(F.linear(x, w, b), "tanh")
        z = F.linear(y, v)
        z.backward(z.detach())
        results.append([values(t) for t in (y, z, x.grad, w.grad, b.grad, v.grad)])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def test_gelu_in_the_product_is_gelu_by_tanh():
    x, w = _core.tensor([[2.0]]), _core.tensor([[1.0]])
    by_tanh, by_erf = F.gelu(x, "tanh").item(), F.gelu(x).item()
    assert F.linear_gelu(x, w).item() == by_tanh != by_erf


def test_linear_gelu_refuses_what_linear_does():
    x, w = _core.ones(2, 3), _core.ones(4, 3)
    with pytest.raises(ValueError, match=r"linear_gelu: x has shape \(2, 3\) and .*\(3, 4\)"):
        F.linear_gelu(x, _core.ones(3, 4))
    with pytest.raises(TypeError, match="linear_gelu: x is float32 and bias is bfloat16"):
        F.linear_gelu(x, w, _core.ones(4, dtype="bfloat16"))


def test_a_weight_used_twice_collects_both_gradients():
    rng = np.random.default_rng(3)
    w = _core.tensor(rng.standard_normal((4, 4)), requires_grad=True)
    x = _core.tensor(rng.standard_normal((2, 4)))
    F.linear(F.linear(x, w), w).sum().backward()
    xs, ws, ones = values(x), values(w), np.ones((2, 4))
    want = ones.T @ (xs @ ws.T) + (ones @ ws).T @ xs
    np.testing.assert_allclose(values(w.grad), want, rtol=1e-10)


def test_gradients_accumulate_over_backwards():
    w = _core.tensor([[2.0]], requires_grad=True)
    for _ in range(3):
        F.linear(_core.tensor([[5.0]]), w).sum().backward()
    assert w.grad.item() == 15.0
    w.grad = None
    F.linear(_core.tensor([[5.0]]), w).sum().backward()
    assert w.grad.item() == 5.0


def test_results_do_not_depend_on_threads():
    x, w = _core.randn(300, 200, seed=1), _core.randn(250, 200, seed=2)
    before = _core.num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            _core.set_num_threads(threads)
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            y = F.linear(a, b)
            (y * y).sum().backward()
            results.append((y, a.grad, b.grad))
    finally:
        _core.set_num_threads(before)
    for other in results[1:]:
        assert all(_core.array_equal(p, q) for p, q in zip(results[0], other, strict=True))


def test_errors():
    x = _core.zeros(2, 3)
    with pytest.raises(ValueError, match=r"matmul: .*\(2, 3\).*\(2, 3\)"):
        x @ x
    with pytest.raises(ValueError, match=r"linear: x .* \(2, 3\) and weight .* \(4, 5\)"):
        F.linear(x, _core.zeros(4, 5))
    with pytest.raises(ValueError, match=r"linear: bias has shape \(3,\)"):
        F.linear(x, _core.zeros(4, 3), _core.zeros(3))
    with pytest.raises(ValueError, match=r"linear: x .* \(2, 3\) .* \(4, 3\).* weight \(in, out\)"):
        F.linear(x, _core.zeros(4, 3), layout="io")
    with pytest.raises(ValueError, match=r"linear: bias .*\(3,\) .* weight \(in, out\)"):
        F.linear(x, _core.zeros(3, 4), _core.zeros(3), layout="io")
    with pytest.raises(ValueError, match="linear_gelu: layout is 'oi' or 'io', not 'xy'"):
        F.linear_gelu(x, _core.zeros(3, 4), layout="xy")
    with pytest.raises(TypeError, match="linear: x is float32 and weight is bfloat16"):
        F.linear(x, _core.zeros(4, 3, dtype="bfloat16"))
    with pytest.raises(TypeError, match="matmul: .* is float32 and .* is float64"):
        x @ _core.zeros(3, 3, dtype="float64")
    with pytest.raises(ValueError, match="must broadcast"):
        _core.zeros(2, 2, 3) @ _core.zeros(3, 3, 2)
    with pytest.raises(TypeError, match="float dtype, not int64"):
        _core.tensor([[1]]) @ _core.tensor([[1]])
