"""Numbers given with tensors: integers stay whole, and what a dtype cannot hold is an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import functional as F
from fsdpc import tensor

ODD = 2**53 + 1  # which float64 does not hold
LARGE = 2**62 + 1


def mask() -> fsdpc.Tensor:
    return tensor([True, False])


def of(dtype: str) -> fsdpc.Tensor:
    return tensor([1, 2]).to(dtype)


def written(x: fsdpc.Tensor, value: Any, at: Any = 0) -> fsdpc.Tensor:
    x[at] = value
    return x


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (lambda: fsdpc.arange(ODD, ODD + 3), [ODD, ODD + 1, ODD + 2]),
        (lambda: fsdpc.arange(2**63 - 2, 2**63 - 1), [2**63 - 2]),
        (lambda: fsdpc.arange(-(2**63), 2**63 - 1, 2**62), [-(2**63), -(2**62), 0, 2**62]),
        (lambda: fsdpc.arange(ODD + 4, ODD, -3), [ODD + 4, ODD + 1]),
        (lambda: fsdpc.full((2,), ODD, dtype="int64"), [ODD, ODD]),
        (lambda: fsdpc.full_like(tensor([1]), -ODD), [-ODD]),
        (lambda: tensor([1, 2]) + LARGE, [LARGE + 1, LARGE + 2]),
        (lambda: LARGE - tensor([1, 2]), [LARGE - 1, LARGE - 2]),
        (lambda: tensor([ODD, ODD - 1]) == ODD, [True, False]),
        (lambda: tensor([ODD, ODD - 1]) < float(2**53), [False, False]),
        (lambda: tensor([ODD, ODD - 1]) > float(2**53), [True, False]),
        (lambda: F.maximum(tensor([1]), ODD), [ODD]),
        (lambda: F.where(mask(), tensor([1, 2]), LARGE), [1, LARGE]),
        (lambda: F.where(mask(), np.int64(ODD), tensor([1, 2])), [ODD, 2]),
        (lambda: F.masked_fill(tensor([1, 2]), mask(), ODD), [ODD, 2]),
        (lambda: F.clamp(tensor([1, 2**60]), ODD, LARGE), [ODD, 2**60]),
        (lambda: F.pad(tensor([1]), (1, 1), value=ODD), [ODD, 1, ODD]),
        (lambda: tensor([1, 2]).fill_(ODD), [ODD, ODD]),
        (lambda: written(tensor([1, 2]), ODD), [ODD, 2]),
        (lambda: written(tensor([1, 2]), ODD, mask()), [ODD, 2]),
        (lambda: written(tensor([1, 2]), ODD, [0]), [ODD, 2]),
    ],
)
def test_integers_stay_whole(got: Callable[[], fsdpc.Tensor], want: list[Any]) -> None:
    assert got().tolist() == want


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: fsdpc.full((2,), 300, dtype="uint8"), "300 does not fit uint8"),
        (lambda: fsdpc.full((2,), -1, dtype="uint8"), "-1 does not fit uint8"),
        (lambda: fsdpc.full((2,), 2**31, dtype="int32"), "2147483648 does not fit int32"),
        (lambda: fsdpc.full((2,), math.nan, dtype="int32"), "nan does not fit int32"),
        (lambda: fsdpc.full((2,), 1e300), r"1e\+300 does not fit float32"),
        (lambda: fsdpc.full((2,), 65520, dtype="float16"), "65520 does not fit float16"),
        (lambda: tensor(300, dtype="uint8"), "300 does not fit uint8"),
        (lambda: tensor([1, -1], dtype="uint8"), "-1 does not fit uint8"),
        (lambda: tensor(np.array([2.0**40]), dtype="int32"), "does not fit int32"),
        (lambda: tensor(2**63), "does not fit int64"),
        (lambda: tensor(np.array([2**63], np.uint64)), "does not fit int64"),
        (lambda: fsdpc.arange(0, 300, dtype="uint8"), "299 does not fit uint8"),
        (lambda: fsdpc.arange(2**63), "does not fit int64"),
        (lambda: fsdpc.linspace(0, 300, 3, dtype="uint8"), "300 does not fit uint8"),
        (lambda: fsdpc.randint(0, 300, 3, dtype="uint8"), "299 does not fit uint8"),
        (lambda: of("int32") + 2**40, "1099511627776 does not fit int32"),
        (lambda: tensor([1]) + 2**63, "does not fit int64"),
        (lambda: F.where(mask(), of("int32"), 2**40), "1099511627776 does not fit int32"),
        (lambda: F.where(mask(), of("uint8"), 300), "300 does not fit uint8"),
        (lambda: F.clamp(of("int32"), min=2**40), "1099511627776 does not fit int32"),
        (lambda: F.masked_fill(of("float16"), mask(), 1e9), r"1e\+09 does not fit float16"),
        (lambda: F.pad(of("float16"), (1, 1), value=1e9), r"1e\+09 does not fit float16"),
        (lambda: of("float16").fill_(1e9), r"1e\+09 does not fit float16"),
        (lambda: written(of("uint8"), 300), "300 does not fit uint8"),
        (lambda: written(of("uint8"), 300, mask()), "300 does not fit uint8"),
        (lambda: written(of("uint8"), [300], [1]), "300 does not fit uint8"),
        (lambda: written(of("float16"), 1e9, [1]), r"1e\+09 does not fit float16"),
        (lambda: written(of("uint8").reshape(1, 2), [7, 300]), "300 does not fit uint8"),
        (lambda: of("int32") ** -1, "pow: an integer tensor to the power of -1: use a float"),
    ],
)
def test_what_a_dtype_cannot_hold_is_refused(make: Callable[[], Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        make()


def test_comparisons_hold_beyond_the_dtype() -> None:
    assert (of("uint8") == 300).tolist() == [False, False]
    assert (of("uint8") < 300).tolist() == [True, True]
    halves = tensor([math.inf, -math.inf, 60000.0]).half()  # as float64 has them
    for number in (1e9, -1e9):
        for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
            wide = getattr(halves.double(), name)(number).tolist()
            assert getattr(halves, name)(number).tolist() == wide, (name, number)
    assert (1e9 > halves).tolist() == [False, True, True]
    ids = tensor([2**63 - 1, -(2**63)])
    for number in (2**63, 2**70, 2**2000, math.inf, 2.0**63):
        assert (ids < number).tolist() == [True, True] == (number > ids).tolist()
        assert (ids >= number).tolist() == [False, False] == (ids == number).tolist()
    for compare in (lambda x: x < 1.5, lambda x: x <= 1.5, lambda x: 1.5 > x, lambda x: 1.5 >= x):
        assert compare(of("int32")).tolist() == [True, False]
    ints = of("int32")
    assert (ints == 1.5).tolist() == [False, False] and (ints != 1.5).tolist() == [True, True]
    assert (ints < math.nan).tolist() == [False, False] == (ints == math.nan).tolist()


def test_infinities_and_truncation_are_not_overflow() -> None:
    assert fsdpc.full((1,), -math.inf, dtype="float16").item() == -math.inf
    assert fsdpc.full((1,), 65519.0, dtype="float16").item() == 65504
    assert fsdpc.full((2,), -2.7, dtype="int32").tolist() == [-2, -2]
    filled = F.masked_fill(of("int32"), mask(), 2.7)
    assert filled.tolist() == [2, 2] and filled.dtype is fsdpc.int32
    assert fsdpc.full((1,), 2, dtype="bool").tolist() == [True]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_negative_zeros_keep_their_sign(dtype: str) -> None:
    x = fsdpc.ones(2, dtype=dtype)
    for y in (
        fsdpc.full((1,), -0.0, dtype=dtype),
        F.where(mask(), -0.0, x)[:1],
        F.where(mask(), x, -0.0)[1:],
        F.masked_fill(x, mask(), -0.0)[:1],
        F.pad(x, (1, 0), value=-0.0)[:1],
        x.fill_(-0.0)[:1],
    ):
        assert math.copysign(1, y.item()) == -1


def test_tensors_without_dimensions_give_way() -> None:
    """As in PyTorch: they change a dtype only if they are of a higher kind."""
    wide, narrow, ints = tensor(0.5, dtype="float64"), fsdpc.ones(2), of("int32")
    assert (narrow + wide).dtype is fsdpc.float32 and (wide * of("float16")).dtype is fsdpc.float16
    assert (ints + tensor(1)).dtype is fsdpc.int32 and (mask() + tensor(1)).dtype is fsdpc.int64
    assert (ints + wide).dtype is fsdpc.float64 and (tensor(1) + wide).dtype is fsdpc.float64
    assert F.where(mask(), narrow, wide).dtype is fsdpc.float32
    assert (mask() + 1).dtype is fsdpc.int64
    assert (ints == tensor(2**32 + 1)).tolist() == [False, False]  # compared, not cast


def test_clamp_by_nan_is_nan() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    for y in (F.clamp(x, min=math.nan), F.clamp(x, max=math.nan), F.clamp(x, math.nan, 1.0)):
        assert np.isnan(y.detach().numpy()).all()
        y.sum().backward()
        assert x.grad.tolist() == [0.0, 0.0]
    for bound in (tensor([math.nan, 1.0]), np.array([math.nan, 1.0], np.float32)):
        y = F.clamp(x, max=bound).tolist()
        assert math.isnan(y[0]) and y[1] == 1.0
    assert np.isnan(F.clamp(x, np.float32("nan")).detach().numpy()).all()


def test_clamp_refuses_what_a_float_cannot_hold() -> None:
    for bound in ({"min": 1e9}, {"max": 1e9}):
        with pytest.raises(ValueError, match=r"1e\+09 does not fit float16"):
            F.clamp(of("float16"), **bound)


def test_quotients_by_numbers_whose_reciprocal_is_not_normal() -> None:
    assert (tensor([1e-5]) / 1e-40).item() == pytest.approx(1e35)
    assert (tensor([1e-300], dtype="float64") / 1e-310).item() == pytest.approx(1e10)
    assert (tensor([1e38]) / 1e39).item() == pytest.approx(0.1)
    assert (tensor([1.0, 0.0]) / 0).tolist()[0] == math.inf


def test_questions_and_signs_of_integers() -> None:
    ints = of("int32")
    assert (-ints).tolist() == [-1, -2] == F.neg(ints).tolist() and (-ints).dtype is fsdpc.int32
    for x in (of("int32"), of("uint8"), mask()):
        assert not F.isnan(x).any().item() and not F.isinf(x).any().item()
        assert F.isfinite(x).all().item()


@pytest.mark.parametrize("number", [300, 2**53 + 1, -1])
def test_numbers_of_numpy_fit_or_raise(number: int) -> None:
    """As Python's do; they are not arrays whose elements are cast."""
    x, value = tensor([1, 2], dtype="uint8"), np.int64(number)
    for write in (
        lambda: F.where(x > 1, x, value),
        lambda: F.masked_fill(x, x > 1, value),
        lambda: F.clamp(x, max=value),
    ):
        with pytest.raises(ValueError, match=str(number)):
            write()


def test_nan_bounds_of_integers() -> None:
    assert np.isnan(F.clamp(tensor([1, 2]), min=math.nan).numpy()).all()


@pytest.mark.parametrize("make", [np.array, tensor], ids=["array", "tensor"])
@pytest.mark.parametrize(
    ("dtype", "number"), [("uint8", 300), ("uint8", -1), ("int32", 2**40), ("float16", 1e9)]
)
def test_values_without_dimensions_fit_or_raise(make: Any, dtype: str, number: float) -> None:
    """As Python's numbers do, and as torch's masked_fill; they wrapped."""
    x, value = of(dtype), make(number)
    for write in (
        lambda: F.where(mask(), x, value),
        lambda: F.where(mask(), value, x),
        lambda: F.masked_fill(x, mask(), value),
        lambda: F.pad(x, (1, 0), value=value),
        lambda: written(x, value, mask()),
        lambda: written(x, value, np.array([0])),
    ):
        with pytest.raises(ValueError, match=f"does not fit {dtype}"):
            write()
    assert x.tolist() == [1, 2]
    if dtype != "float16":
        with pytest.raises(ValueError, match=f"does not fit {dtype}"):
            F.clamp(x, max=value)
    if make is np.array:  # a number everywhere
        with pytest.raises(ValueError, match=f"does not fit {dtype}"):
            written(x, value)
        with pytest.raises(ValueError, match=f"does not fit {dtype}"):
            x.fill_(value)


@pytest.mark.parametrize("make", [np.array, tensor], ids=["array", "tensor"])
def test_values_without_dimensions_are_exact(make: Any) -> None:
    x = tensor([1, 2])
    assert F.where(mask(), make(LARGE), x).tolist() == [LARGE, 2]
    assert F.masked_fill(x, mask(), make(LARGE)).tolist() == [LARGE, 2]
    assert F.pad(x, (1, 0), value=make(LARGE)).tolist() == [LARGE, 1, 2]
    assert fsdpc.full((1,), make(LARGE), dtype="int64").tolist() == [LARGE]
    assert (x + make(LARGE)).tolist() == [LARGE + 1, LARGE + 2]
    filled = F.masked_fill(x, mask(), make(1.5))
    assert filled.tolist() == [1, 2] and filled.dtype is fsdpc.int64
    assert F.masked_fill(of("float16"), mask(), make(math.inf)).tolist() == [math.inf, 2.0]
    with pytest.raises(ValueError, match="a value of shape"):
        F.masked_fill(x, mask(), make([1]))


def test_a_filled_value_has_its_gradient() -> None:
    x, value = tensor([1.0, 2.0], requires_grad=True), tensor(3.0, dtype="float64")
    value.requires_grad = True
    (F.masked_fill(x, mask(), value) * tensor([5.0, 7.0])).sum().backward()
    assert x.grad.tolist() == [0.0, 7.0] and value.grad.tolist() == 5.0


def test_arrays_that_hold_no_real_number() -> None:
    for value in (np.array(1j), np.array("1"), np.array(None)):
        with pytest.raises((TypeError, ValueError)):
            written(tensor([1.0, 2.0]), value)
        with pytest.raises((TypeError, ValueError)):
            fsdpc.full((1,), value)
    assert (tensor([1.0]) + np.longdouble(0.5)).tolist() == [1.5]


@pytest.mark.parametrize("numbers", [[2**63, -1], [[1, -1], [2**63 + 1, 0]], (2**63, -(2**63))])
def test_integers_beyond_int64_become_no_floats(numbers: Any) -> None:
    """NumPy has no integer dtype for all of them, and takes float64."""
    with pytest.raises(ValueError, match="922337203685477580[89] does not fit int64"):
        tensor(numbers)
    with pytest.raises(ValueError, match="does not fit int64"):
        tensor([2**63])
    want = np.array(numbers, np.float64).tolist()
    assert tensor(numbers, dtype="float64").tolist() == want
    assert tensor([2**63], dtype="float64").tolist() == [2.0**63]
    assert tensor([2**63, 1.5]).dtype is fsdpc.float32
    assert tensor([1, -1, True]).dtype is fsdpc.int64


def test_tuples_are_lists() -> None:
    """They are passed on whole, not as the arguments of NumPy's function."""
    assert tensor((1, 2)).tolist() == [1, 2] and tensor((1.5,)).tolist() == [1.5]
    assert tensor(()).shape == (0,) and tensor(((1, 2), (3, 4))).shape == (2, 2)
    assert written(tensor([1.0, 2.0]), (3, 4), slice(None)).tolist() == [3.0, 4.0]
    for wrong in ((3, "float64"), (2.5, None)):
        with pytest.raises((TypeError, ValueError)):
            tensor(wrong)
    for operation in (lambda x: x ** (1, 2), lambda x: x @ (1, 2)):
        with pytest.raises(TypeError, match="tuple"):
            operation(tensor([1.0, 2.0]))
