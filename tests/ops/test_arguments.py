"""Arguments of operations: how calls are parsed, and the messages about bad ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsdpc import _core, tensor
from fsdpc import functional as F

X = [[1.0, 2.0], [3.0, 4.0]]


def refuses(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    """The message of the exception that a call raises."""
    with pytest.raises((TypeError, ValueError, IndexError, OverflowError)) as raised:
        call(*args, **named)
    return str(raised.value)


def test_positions_and_names_agree() -> None:
    x, w = tensor(X), tensor([1.0, 1.0])
    assert F.array_equal(F.layer_norm(x, w, eps=0.5), F.layer_norm(x, weight=w, bias=None, eps=0.5))
    assert F.array_equal(F.softmax(dim=0, x=x), x.softmax(0))
    assert F.array_equal(F.transpose(x, 0, 1), x.transpose(dim1=1, dim0=0))
    assert x.reshape(1, -1).shape == x.reshape((1, -1)).shape == (1, 4)
    assert F.layer_norm(x, eps=None).tolist() == F.layer_norm(x).tolist()  # the default


def test_wrong_names_and_numbers_of_arguments() -> None:
    x = tensor(X)
    assert refuses(F.linear, x) == "linear() needs argument 'weight'"
    assert refuses(F.neg, x, x) == "neg() takes at most 1 arguments, 2 given"
    assert refuses(x.softmax, 0, 0) == "softmax() takes at most 1 arguments, 2 given"
    assert refuses(F.softmax, x, axis=0) == "softmax() got an unexpected argument 'axis'"
    assert refuses(F.softmax, x, x=x) == "softmax() got argument 'x' twice"
    assert refuses(x.softmax, x=x) == "softmax() got an unexpected argument 'x'"
    assert refuses(x.reshape, shape=4) == "reshape() got an unexpected argument 'shape'"


@pytest.mark.parametrize("value", [None, "2", [2.0]])
def test_a_required_number_is_a_number(value: Any) -> None:
    """None was read as 0, and by linspace as whatever the memory held."""
    for call in (_core.clamp_min, _core.clamp_max, _core.huber):
        assert "must be real number" in refuses(call, tensor(X), value)
    assert "must be real number" in refuses(_core.linspace, value, 1.0, 3)
    kind = type(value).__name__
    assert refuses(_core.arange, value) == f"arange: a number is needed for start, not {kind}"
    assert refuses(_core.full, (), value) == f"full: a number is needed for value, not {kind}"


def test_a_dimension_fits_an_int() -> None:
    """It was cut to 32 bits, and so was 0."""
    index = tensor([0])
    assert refuses(_core.element_places, index, (1,), 2**32) == "4294967296 does not fit an int"
    assert refuses(F.softmax, tensor(X), 2**32) == "4294967296 does not fit an int"
    assert refuses(F.permute, tensor(X), (1, 2**32)) == "4294967296 does not fit an int"


def test_a_choice_is_one_of_two() -> None:
    x = tensor(X)
    assert refuses(F.gelu, x, "erf") == "gelu: approximate is 'none' or 'tanh', not 'erf'"
    assert refuses(F.gelu, x, None) == "gelu: approximate is 'none' or 'tanh', not None"
    assert refuses(F.linear_gelu, x, x, layout=1) == "linear_gelu: layout is 'oi' or 'io', not 1"


def test_a_callable_can_be_called() -> None:
    x = tensor(X, requires_grad=True)
    assert refuses(F.boundary, x, 1) == "boundary: int cannot be called"
    assert refuses(x.register_hook, "f") == "register_hook: str cannot be called"
    assert refuses(F.custom, [x], [x], 1) == "custom: int cannot be called"


def test_sizes_have_their_number() -> None:
    images = _core.zeros(1, 1, 4, 4)
    assert refuses(_core.pool2d, images, True, (2,), (2, 2), (0, 0)) == (
        "pool2d: kernel: 1 numbers, not 2")  # fmt: skip
    assert refuses(_core.pool2d, images, True, (2, 2), (2, -1), (0, 0)) == (
        "pool2d: stride: extent -1 of dimension 1 is negative")  # fmt: skip


def test_a_write_through_functional_reshape_is_recorded_like_one_through_the_method() -> None:
    for reshape in (F.reshape, _core.Tensor.reshape):
        x = tensor([1.0, 2.0], requires_grad=True)
        y = x * 3
        flat = reshape(y, (2, 1))
        flat *= 2
        assert y.tolist() == [6.0, 12.0]
        y.sum().backward()
        assert x.grad.tolist() == [6.0, 6.0]
