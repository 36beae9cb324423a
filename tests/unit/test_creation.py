"""Tensors made of a shape: values, dtypes, and the same draws from the same seed."""

from __future__ import annotations

import numpy as np
import pytest

import fsdpc


def test_values_are_numpys() -> None:
    for dtype in ("float32", "float64", "bfloat16", "int64"):
        found = fsdpc.linspace(-1, 3, 5, dtype)
        assert found.dtype.name == dtype and found.double().tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
        assert fsdpc.eye(2, 3, dtype).double().tolist() == np.eye(2, 3).tolist()
    assert fsdpc.eye(3).shape == (3, 3) and fsdpc.linspace(0, 1, 1).tolist() == [0.0]
    assert fsdpc.arange(1, 7, 2).tolist() == [1, 3, 5]
    assert fsdpc.full((2,), 3, dtype="int32").tolist() == [3, 3]


def test_like_another() -> None:
    x = fsdpc.ones(2, 3, dtype="bfloat16")
    for made, value in (
        (fsdpc.zeros_like(x), 0.0),
        (fsdpc.ones_like(x), 1.0),
        (fsdpc.full_like(x, 2.5), 2.5),
    ):
        assert made.dtype is x.dtype and made.double().tolist() == np.full((2, 3), value).tolist()
    for make in (fsdpc.empty_like, fsdpc.rand_like, fsdpc.randn_like):
        assert make(x).shape == x.shape and make(x).dtype is x.dtype
        made = make(x, dtype="float64", requires_grad=True)
        assert made.dtype is fsdpc.float64 and made.requires_grad


def test_draws() -> None:
    fsdpc.manual_seed(5)
    x, y, n = fsdpc.rand(10_000), fsdpc.rand(10_000), fsdpc.randint(-3, 4, (10_000,))
    a = x.numpy()
    assert 0 <= a.min() and a.max() < 1
    assert abs(a.mean() - 0.5) < 5 / np.sqrt(12 * 10_000)  # five standard deviations
    assert not fsdpc.functional.array_equal(x, y)
    assert n.dtype is fsdpc.int64 and set(n.tolist()) == set(range(-3, 4))
    assert abs(n.numpy().mean()) < 5 * 2 / np.sqrt(10_000)
    fsdpc.manual_seed(5)
    assert fsdpc.functional.array_equal(fsdpc.rand(10_000), x)
    assert fsdpc.rand(0, 2).shape == (0, 2) and fsdpc.randint(0, 2, 3, "int32").shape == (3,)
    with pytest.raises(ValueError, match=r"no integer in \[3, 3\)"):
        fsdpc.randint(3, 3, (2,))


@pytest.mark.parametrize(
    ("low", "high"),
    [(-5, 60_000), (0, 2**24), (7, 2**31), (-(2**40), 2**45), (-(2**63), 2**63 - 1)],
)
def test_integers_from_a_wide_range(low: int, high: int) -> None:
    n = 20_000
    x = fsdpc.randint(low, high, n).numpy()
    span = high - low
    assert low <= int(x.min()) < low + 0.01 * span
    assert high - 0.01 * span < int(x.max()) < high
    tenths = np.histogram((x.astype("float64") - low) / span, bins=10, range=(0, 1))[0]
    assert abs(tenths - n / 10).max() < 5 * np.sqrt(n / 10)
    # As many different ones as chance has: 2^24 steps of the range would be far fewer.
    twins = n - len(np.unique(x))
    expected = n - span * -np.expm1(-n / span) if span < 2**24 else n * n / 2 / span
    assert abs(twins - expected) < 6 * np.sqrt(expected + 1)
    # The lowest bit is as random as the others.
    assert abs(int((x & 1).sum()) - n / 2) < 5 * np.sqrt(n) / 2


def test_equal_distances() -> None:
    for args in ((0, 1, 4097), (-2.5, 7.3, 1001), (1, 0, 77), (5, 5, 4), (3, 4, 1), (3, 4, 0)):
        want = np.linspace(*args)
        assert (fsdpc.linspace(*args, dtype="float64").numpy() == want).all(), args
        assert (fsdpc.linspace(*args).numpy() == want.astype("float32")).all(), args
    assert fsdpc.linspace(0, 10, 11, "int32").tolist() == list(range(11))
    with pytest.raises(ValueError, match="steps is -1 and cannot be negative"):
        fsdpc.linspace(0, 1, -1)


def test_eye() -> None:
    for rows, cols in ((3, 3), (2, 5), (5, 2), (1, 1), (0, 3), (3, 0), (4, None)):
        for dtype in ("float32", "bfloat16", "int64"):
            x = fsdpc.eye(rows, cols, dtype)
            assert x.dtype.name == dtype and x.double().tolist() == np.eye(rows, cols).tolist()


def test_arange_beyond_a_block() -> None:
    for args in ((5000,), (-3, 4000, 3), (0, 700, 0.125), (2**52, 2**52 + 3000)):
        for dtype in ("int64", "float64", "float32", "int32"):
            if dtype == "int32" and args[0] > 2**31:
                continue
            want = np.arange(*args, dtype="float64").astype(dtype)
            assert (fsdpc.arange(*args, dtype=dtype).numpy() == want).all(), (args, dtype)


def test_filled_tensors_of_every_width() -> None:
    for dtype in ("bool", "uint8", "int32", "int64", "bfloat16", "float16", "float32", "float64"):
        x = fsdpc.full((3, 700), 1, dtype=dtype)
        assert x.dtype.name == dtype and x.to("float64").numpy().tolist() == [[1.0] * 700] * 3
