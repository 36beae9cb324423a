"""Unary and binary operations, promotion, casts, gates, dropout."""

from __future__ import annotations

import math
import operator
from functools import partial

import numpy as np
import pytest
from oracle import FLOATS, check, values

from fsdpc import _core
from fsdpc import functional as F

SHAPES = [(0,), (), (1,), (3, 0, 2), (7, 5), (70_001,)]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


# name: (operation, reference, lowest, highest, scale of the tolerance)
UNARY = {
    "neg": (F.neg, np.negative, -3, 3, 1),
    "abs": (F.abs, np.abs, 0.5, 3, 1),
    "abs of negatives": (F.abs, np.abs, -3, -0.5, 1),
    "exp": (F.exp, np.exp, -3, 3, 1),
    "log": (F.log, np.log, 0.5, 4, 1),
    "sqrt": (F.sqrt, np.sqrt, 0.5, 4, 1),
    "tanh": (F.tanh, np.tanh, -3, 3, 2),
    "sigmoid": (F.sigmoid, _sigmoid, -4, 4, 1),
    "silu": (F.silu, lambda x: x * _sigmoid(x), -4, 4, 1),
    "relu": (F.relu, lambda x: np.maximum(x, 0), 0.1, 3, 1),
    "relu of negatives": (F.relu, lambda x: np.maximum(x, 0), -3, -0.1, 1),
    "gelu": (F.gelu, lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))), -3, 3, 1),
    "gelu tanh": (
        lambda x: F.gelu(x, "tanh"),
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        -3, 3, 1,
    ),
    "rsqrt": (F.rsqrt, lambda x: 1 / np.sqrt(x), 0.5, 4, 2),
    "sin": (F.sin, np.sin, -9, 9, 1),
    "cos": (F.cos, np.cos, -9, 9, 1),
    "log1p": (F.log1p, np.log1p, -0.5, 4, 1),
    "expm1": (F.expm1, np.expm1, -2, 2, 1),
    "erf": (F.erf, _erf, -2, 2, 1),
    "sign": (F.sign, np.sign, 0.1, 3, 1),
    "sign of negatives": (F.sign, np.sign, -3, -0.1, 1),
    "x + 2": (lambda x: x + 2, lambda x: x + 2, -3, 3, 1),
    "2 - x": (lambda x: 2 - x, lambda x: 2 - x, -3, 3, 1),
    "x - 0.5": (lambda x: x - 0.5, lambda x: x - 0.5, -3, 3, 1),
    "x * -1.5": (lambda x: x * -1.5, lambda x: x * -1.5, -3, 3, 1),
    "x / 4": (lambda x: x / 4, lambda x: x / 4, -3, 3, 1),
    "2 / x": (lambda x: 2 / x, lambda x: 2 / x, 0.5, 3, 2),
    "x ** 3": (lambda x: x**3, lambda x: x**3, -2, 2, 2),
    "x ** 0.5": (lambda x: x**0.5, lambda x: x**0.5, 0.5, 3, 1),
    "2 ** x": (lambda x: 2**x, lambda x: 2**x, -2, 2, 2),
    "x ** 0": (lambda x: x**0, lambda x: x**0, -2, 2, 1),
}  # fmt: skip


def _inputs(shape, low, high, seed=0):
    return np.random.default_rng(seed).uniform(low, high, shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype):
    op, reference, low, high, scale = UNARY[name]
    for shape in SHAPES[:-1]:
        check(op, reference, [_inputs(shape, low, high)], dtype, scale=scale, what=name)


@pytest.mark.parametrize("name", UNARY)
def test_unary_large(name):
    op, reference, low, high, scale = UNARY[name]
    check(op, reference, [_inputs(SHAPES[-1], low, high)], "float32", scale=scale, what=name)


BINARY = {
    "add": (F.add, np.add),
    "sub": (F.sub, np.subtract),
    "mul": (F.mul, np.multiply),
    "div": (F.div, np.divide),
    "maximum": (F.maximum, np.maximum),
    "minimum": (F.minimum, np.minimum),
    "pow": (lambda a, b: F.pow(b, a), lambda a, b: np.power(b, a)),
}
PAIRS = [
    ((), ()), ((0,), (0,)), ((1,), (0,)), ((5,), (5,)), ((3, 5), (5,)), ((5,), (3, 5)),
    ((3, 1), (1, 4)), ((2, 1, 3), (4, 1)), ((2, 3), ()), ((1, 1), (3,)), ((0, 3), (3,)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, dtype):
    op, reference = BINARY[name]
    for a, b in PAIRS:
        inputs = [_inputs(a, -2, 2, 1), _inputs(b, 0.5, 2, 2)]
        check(op, reference, inputs, dtype, scale=3, what=f"{name} {a} {b}")


@pytest.mark.parametrize("name", [name for name in BINARY if "imum" not in name])  # kinks
def test_binary_large(name):
    op, reference = BINARY[name]
    inputs = [_inputs((257, 301), -2, 2, 1), _inputs((301,), 0.5, 2, 2)]
    check(op, reference, inputs, "float32", scale=20, what=name)


@pytest.mark.parametrize("name", BINARY)
def test_one_side_wants_a_gradient(name):
    op, reference = BINARY[name]
    inputs = [_inputs((4, 3), -2, 2, 1), _inputs((3,), 0.5, 2, 2)]
    for side in (0, 1):
        check(op, reference, inputs, "float32", scale=3, wrt=[side], what=name)


def test_the_same_tensor_on_both_sides():
    x = _core.tensor([1.5, -2.0], requires_grad=True)
    (x * x + x / x - x).sum().backward()
    assert x.grad.tolist() == [2.0, -5.0]


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float16", "float32"),
        ("float16", "float16", "float16"),
        ("float64", "float32", "float64"),
        ("int64", "bfloat16", "bfloat16"),
        ("float32", "int32", "float32"),
        ("int32", "int64", "int64"),
        ("int32", "int32", "int32"),
        ("uint8", "int32", "int32"),
        ("bool", "float32", "float32"),
    ],
)
def test_promotion(a, b, result):
    x, y = _core.ones(3, dtype=a), _core.ones(3, dtype=b)
    z = x + y
    assert z.dtype.name == result
    assert z.to("float64").tolist() == [2.0, 2.0, 2.0]


def test_gradients_come_back_in_each_sides_dtype():
    x = _core.ones(3, dtype="bfloat16", requires_grad=True)
    y = _core.ones(3, dtype="float32", requires_grad=True)
    (x * y * 3).sum().backward()
    assert x.grad.dtype is _core.bfloat16 and y.grad.dtype is _core.float32
    assert values(x.grad).tolist() == [3.0] * 3


def test_integers():
    x = _core.tensor([1, 2, -3])
    assert (x + 1).tolist() == [2, 3, -2] and (x + 1).dtype is _core.int64
    assert (2 - x).tolist() == [1, 0, 5]
    assert (x * x).tolist() == [1, 4, 9]
    assert (x / 2).tolist() == [0.5, 1.0, -1.5] and (x / 2).dtype is _core.float32
    assert (x * 0.5).tolist() == [0.5, 1.0, -1.5]
    with pytest.raises(TypeError, match="no arithmetic on bool"):
        _core.ones(2, dtype="bool") + _core.ones(2, dtype="bool")
    with pytest.raises(TypeError, match="exp: the tensor must have a float dtype, not int64"):
        F.exp(x)


def test_integers_to_a_power():
    x, n = _core.tensor([2, -3, -1, 1, 5]), _core.tensor([10, 3, -3, -7, -1])
    assert (x**n).tolist() == [1024, -27, -1, 1, 0] and (x**2).tolist() == [4, 9, 1, 1, 25]
    assert (2 ** _core.tensor([3, 0])).tolist() == [8, 1]
    assert (_core.tensor([4, 9]) ** 0.5).tolist() == [2.0, 3.0]


def test_powers_of_zero_and_of_negatives():
    x = _core.tensor([0.0, 0.0, -2.0, 0.0], dtype="float64", requires_grad=True)
    n = _core.tensor([2.0, 0.0, 3.0, 1.0], dtype="float64", requires_grad=True)
    y = x**n
    assert y.tolist() == [0.0, 1.0, -8.0, 0.0]
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 12.0, 1.0] and n.grad.tolist()[:2] == [0.0, 0.0]


def test_extrema_of_two_as_ieee_and_torch_have_them():
    x = _core.tensor([1.0, 2.0, math.nan, 5.0], requires_grad=True)
    y = _core.tensor([1.0, 3.0, 1.0, math.nan], requires_grad=True)
    big, small = F.maximum(x, y), F.minimum(x, y)
    assert big.tolist()[:2] == [1.0, 3.0] and small.tolist()[:2] == [1.0, 2.0]
    assert np.isnan(big.numpy()[2:]).all() and np.isnan(small.numpy()[2:]).all()
    big[:2].sum().backward()
    assert x.grad.tolist()[:2] == [0.5, 0.0] and y.grad.tolist()[:2] == [0.5, 1.0]
    ints = _core.tensor([1, -5])
    assert ints.maximum(0).tolist() == [1, 0] and ints.minimum(ints).tolist() == [1, -5]
    assert F.maximum(ints, 0).tolist() == [1, 0] and F.minimum(ints, 2**40).tolist() == [1, -5]


@pytest.mark.parametrize("dtype", FLOATS)
def test_where(dtype):
    for shapes in [((3, 5), (3, 5), (5,)), ((5,), (3, 1), ()), ((2, 1, 3), (4, 1), (1,))]:
        keep = np.random.default_rng(1).random(shapes[0]) > 0.5
        inputs = [_inputs(s, -2, 2, i) for i, s in enumerate(shapes[1:])]
        check(partial(F.where, keep), partial(np.where, keep), inputs, dtype, what="where")
    check(lambda a: F.where(a > 0, a, 1.5), lambda a: np.where(a > 0, a, 1.5),
          [_inputs((4, 4), 0.1, 2)], dtype)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "bool"])
def test_where_with_a_zero(dtype):
    """Which is one pass: a chosen -0 stays, what is not chosen is 0, the dtype x's."""
    keep = _core.tensor([True, False, True])
    x = _core.tensor([-0.0, -3.0, 1.0]).to(dtype)
    for y in (F.where(keep, x, 0), F.where(keep == 0, 0, x), F.tril(x.reshape(1, 3), 2)):
        dtype_of_arithmetic = "int64" if dtype == "bool" and y.ndim == 1 else dtype
        assert y.dtype is _core.as_dtype(dtype_of_arithmetic)
    signs = np.signbit(F.where(keep, x.float(), 0).numpy()).tolist()
    assert signs == [dtype not in ("int32", "bool"), False, False]
    assert F.where(keep, x, 0).float().abs().tolist() == [0.0, 0.0, 1.0]


def test_where_keeps_bits_and_gives_no_gradient_to_the_other():
    keep = [True, False, True, False]
    x = _core.tensor([-0.0, math.nan, math.inf, 1.0], requires_grad=True)
    y = _core.tensor([math.nan, -0.0, math.nan, 2.0], requires_grad=True)
    z = F.where(keep, x, y)
    assert z.tolist() == [0.0, 0.0, math.inf, 2.0] and np.signbit(z.numpy()).tolist()[:2] == [1, 1]
    z.sum().backward()
    assert x.grad.tolist() == [1, 0, 1, 0] and y.grad.tolist() == [0, 1, 0, 1]
    for dtype in ("int32", "int64", "uint8", "bool"):
        a, b = _core.ones(4, dtype=dtype), _core.zeros(4, dtype=dtype)
        assert F.where(keep, a, b).dtype is a.dtype and F.where(keep, a, b).tolist() == keep
    assert F.where(keep, 1, 0).dtype is _core.int64 and F.where(keep, 1.5, 0).tolist()[0] == 1.5
    with pytest.raises(ValueError, match="extents must be equal or 1"):
        F.where(keep, _core.zeros(3), 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_clamp(dtype):
    a = _inputs((6, 7), -3, 3)
    for low, high in [(-1.0, 1.0), (None, 0.5), (-0.25, None)]:
        check(partial(F.clamp, min=low, max=high), partial(np.clip, a_min=low, a_max=high), [a],
              dtype)  # fmt: skip
    x = _core.tensor([-1.0, 0.0, 1.0, 2.0, math.nan], requires_grad=True)
    y = x.clamp(-1, 1)
    assert y.tolist()[:4] == [-1, 0, 1, 1] and np.isnan(y.numpy()[4])
    y[:4].sum().backward()
    assert x.grad.tolist()[:4] == [1, 1, 1, 0]  # at a bound it passes, as in torch
    assert _core.tensor([-5, 5]).clamp(0, 3).tolist() == [0, 3]
    half = _core.tensor([0.0, 0.1, 1.0]).to("bfloat16").requires_grad_()  # 0.1 is rounded up
    bounded = half.clamp(0.1, 0.9)  # bounds as bfloat16 has them
    assert bounded.tolist() == [0.10009765625, 0.10009765625, 0.8984375]
    bounded.sum().backward()
    assert half.grad.tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="give min, max or both"):
        x.clamp()


def test_logic():
    a, b = np.array([[True], [False]]), np.array([True, False])
    x, y = _core.tensor(a), _core.tensor(b)
    assert (x & y).tolist() == (a & b).tolist() and (x | y).tolist() == (a | b).tolist()
    assert (x ^ y).tolist() == (a ^ b).tolist() and (~y).tolist() == [False, True]
    assert (x & b).tolist() == (a & b).tolist()
    numbers = _core.tensor([0.0, -2.0, math.nan])
    assert F.logical_not(numbers).tolist() == [True, False, False]
    assert numbers.logical_and([1, 0, 1]).tolist() == [False, False, True]
    assert numbers.logical_or([0, 0, 0]).tolist() == [False, True, True]
    assert numbers.logical_xor([1, 1, 0]).tolist() == [True, False, True]
    special = _core.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert special.isnan().tolist() == [True, False, False, False]
    assert special.isinf().tolist() == [False, True, True, False]
    assert special.isfinite().tolist() == [False, False, False, True]
    with pytest.raises(TypeError, match="& is for tensors of bool, not float32"):
        numbers & numbers
    with pytest.raises(TypeError, match="~ is for tensors of bool, not float32"):
        ~numbers  # noqa: B018


COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
SIDES = [((7,), (7,)), ((3, 5), (5,)), ((3, 1, 5), (4, 1)), ((0, 2), (1, 2)), ((), (3,))]


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float32"),
    ("bfloat16", "float16"), ("int32", "int64"), ("int64", "float32"), ("uint8", "bool"),
    ("bool", "bool"), ("uint8", "int64")])  # fmt: skip
@pytest.mark.parametrize("compare", COMPARISONS)
def test_comparisons(compare, dtypes):
    rng = np.random.default_rng(1)
    for shapes in SIDES:
        a, b = (rng.integers(0, 3, shape) for shape in shapes)
        x, y = (_core.tensor(v, dtype=d) for v, d in zip((a, b), dtypes, strict=True))
        a, b = (v != 0 if d == "bool" else v for v, d in zip((a, b), dtypes, strict=True))
        found, want = compare(x, y), compare(a, b)
        assert found.dtype is _core.bool_ and found.shape == want.shape
        assert found.tolist() == want.tolist()
        assert found.numpy().dtype == np.bool_ and found.sum().item() == want.sum()
        assert compare(x, 1).tolist() == compare(a, 1).tolist()
        assert compare(1, x).tolist() == compare(1, a).tolist()
        assert compare(x, 1.5).tolist() == compare(a, 1.5).tolist()


def test_comparisons_of_what_is_special():
    nan, x = float("nan"), _core.tensor([1.0, math.nan, math.inf, -0.0], requires_grad=True)
    assert (x == x).tolist() == [True, False, True, True]
    assert (x != nan).tolist() == [True] * 4 and (x < nan).tolist() == [False] * 4
    assert (x == 0.0).tolist() == [False, False, False, True] and not (x == 0).requires_grad
    assert (_core.tensor([0.1], dtype="bfloat16") == 0.1).item()  # as in a tensor of that dtype
    ids = _core.tensor([2**24 + 1, 2])
    assert (ids == 2.0**24).tolist() == [False, False] and (ids < 2**40).tolist() == [True, True]
    assert (x == None) is False and (x != "x") is True  # noqa: E711
    with pytest.raises(TypeError, match="not supported between"):
        x < "x"  # noqa: B015
    with pytest.raises(ValueError, match="extents must be equal or 1"):
        x == _core.zeros(3)  # noqa: B015


def test_accuracy():
    guesses, targets = _core.tensor([[1, 2], [3, 4]]), _core.tensor([[1, 0], [3, 4]])
    assert (guesses == targets).mean().item() == 0.75
    assert (guesses == targets).mean(1).tolist() == [0.5, 1.0]
    assert (guesses == targets).sum(0, keepdim=True).tolist() == [[2, 1]]
    assert (guesses == targets).sum().dtype is _core.int64


def test_special_values_follow_ieee():
    x = _core.tensor([math.nan, math.inf, -math.inf, -0.0])
    assert np.isnan(F.relu(x).numpy()[0]) and F.relu(x).tolist()[1:] == [math.inf, 0.0, 0.0]
    assert F.exp(x).tolist()[1:] == [math.inf, 0.0, 1.0]
    assert np.isnan(F.sqrt(_core.tensor([-1.0])).item())
    assert F.log(_core.tensor([0.0])).item() == -math.inf
    assert (_core.tensor([1.0]) / _core.tensor([0.0])).item() == math.inf
    assert np.isnan(F.tanh(x).numpy()[0]) and F.tanh(x).tolist()[1:3] == [1.0, -1.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0,), (1,), (7, 5), (3, 67)])
def test_swiglu(dtype, shape):
    inputs = [_inputs(shape, -3, 3, 1), _inputs(shape, -2, 2, 2)]
    check(F.swiglu, lambda g, u: g * _sigmoid(g) * u, inputs, dtype, scale=2, what="swiglu")


def test_swiglu_of_one_tensor_twice():
    x = _core.tensor([0.7], requires_grad=True)
    F.swiglu(x, x).backward(_core.ones(1))
    s = _sigmoid(0.7)
    assert x.grad.item() == pytest.approx(2 * 0.7 * s + 0.49 * s * (1 - s), rel=1e-5)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_cast(source, target):
    if source == target:
        x = _core.ones(2, dtype=source)
        assert x.to(target) is x
        return
    for shape in [(0,), (1,), (5, 3)]:
        coarse = max((source, target), key=lambda d: {"bfloat16": 3, "float16": 2}.get(d, 0))
        data = _inputs(shape, -3, 3)
        x = _core.tensor(data).to(source)
        x.requires_grad = True
        y = x.to(target)
        np.testing.assert_allclose(values(y), data, rtol=2**-7 if "16" in coarse else 1e-6)
        y.backward(_core.full(shape, 0.5, dtype=target))
        assert x.grad.dtype.name == source
        assert values(x.grad).tolist() == np.full(shape, 0.5).tolist()


def test_cast_rounds_to_nearest_even():
    halfway = np.array([1 + 2**-8, 1 + 3 * 2**-8], dtype=np.float32)  # between bf16 numbers
    assert values(_core.tensor(halfway).bfloat16()).tolist() == [1.0, 1 + 2**-6]
    assert _core.tensor([1.9, -1.9]).to("int32").tolist() == [1, -1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout(dtype):
    _core.manual_seed(11)
    x = _core.ones(20_000, dtype=dtype, requires_grad=True)
    y = F.dropout(x, 0.25)
    kept = values(y) != 0
    scale = float(np.max(values(y)))
    # 20,000 draws: 0.25 within five standard deviations
    assert abs(1 - kept.mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 20_000)
    assert scale == pytest.approx(1 / 0.75, rel=2**-8)
    y.backward(_core.ones(20_000, dtype=dtype))
    assert _core.array_equal(x.grad, y.detach())
    _core.manual_seed(11)
    assert _core.array_equal(F.dropout(x, 0.25), y)
    assert not _core.array_equal(F.dropout(x, 0.25), y)


def test_dropout_that_does_nothing_or_all():
    x = _core.ones(5, requires_grad=True)
    assert F.dropout(x, 0.5, training=False).is_leaf
    assert F.dropout(x, 0.0).is_leaf
    assert F.dropout(x, 1.0).tolist() == [0.0] * 5
    assert F.dropout(_core.ones(0), 0.5).shape == (0,)
    with pytest.raises(ValueError, match="p = 1.5"):
        F.dropout(x, 1.5)


def test_shapes_that_do_not_fit_are_both_shown():
    with pytest.raises(ValueError, match=r"add: .*\(2, 3\).*\(2,\)"):
        _core.ones(2, 3) + _core.ones(2)
    with pytest.raises(ValueError, match=r"swiglu: gate has shape \(2,\) and up has shape \(3,\)"):
        F.swiglu(_core.ones(2), _core.ones(3))
    with pytest.raises(TypeError, match="gate is float32 and up is bfloat16"):
        F.swiglu(_core.ones(2), _core.ones(2, dtype="bfloat16"))
    with pytest.raises(TypeError):
        _core.ones(2) + "text"
    with pytest.raises(ValueError, match="approximate is 'none' or 'tanh'"):
        F.gelu(_core.ones(2), "sigmoid")
