"""Operations against NumPy in float64, gradients against central differences.

An operation runs in a dtype on inputs that were rounded to it; the reference is a NumPy function of
the same (rounded) values in float64. The gradient of ``sum(f(x) * g)`` for a random g is compared
with central differences of the reference: of every element where there are few, else along random
directions.

Tolerances. Kernels compute in fp32 (fp64 for float64) and round once, so an operation of k rounded
inputs is off by a few units in the last place of its dtype: 2^-24, 2^-9 (bf16), 2^-11 (fp16),
2^-53. Sums of n products add about sqrt(n) of fp32's. Central differences with h = 1e-4 are good
to about 1e-7 of the values that enter. TOLERANCE holds the bound relative to the largest value of
the array; cases that chain several rounded steps pass a larger `scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fsdpc import _core

TOLERANCE = {"float32": 3e-6, "bfloat16": 1.2e-2, "float16": 1.5e-3, "float64": 2e-7}
FLOATS = tuple(TOLERANCE)
STEP = 1e-4
MANY = 160  # more elements than this: along directions instead of one by one


def rounded(array: np.ndarray, dtype: str) -> tuple[_core.Tensor, np.ndarray]:
    """The array as a tensor of the dtype, and the values that tensor holds."""
    tensor = _core.tensor(np.asarray(array, dtype=np.float64)).to(dtype)
    return tensor, values(tensor)


def values(tensor: _core.Tensor) -> np.ndarray:
    """A tensor's values in float64."""
    return np.array(tensor.detach().to("float64").numpy())


def assert_close(got: np.ndarray, want: np.ndarray, dtype: str, scale: float, what: str) -> None:
    assert got.shape == want.shape, what
    if want.size == 0:
        return
    bound = TOLERANCE[dtype] * scale * max(1.0, float(np.max(np.abs(want))))
    error = float(np.max(np.abs(got - want)))
    assert error <= bound, f"{what} in {dtype}: off by {error:.3g}, at most {bound:.3g} expected"


def _directional(f: Callable[..., float], arrays: list[np.ndarray], i: int, v: np.ndarray) -> float:
    up, down = list(arrays), list(arrays)
    up[i], down[i] = arrays[i] + STEP * v, arrays[i] - STEP * v
    return (f(*up) - f(*down)) / (2 * STEP)


def _assert_gradient(
    got: np.ndarray, f: Callable[..., float], arrays: list[np.ndarray], i: int, dtype: str,
    scale: float, what: str, rng: np.random.Generator,
) -> None:  # fmt: skip
    if got.size <= MANY:
        want = np.zeros_like(arrays[i])
        for at in np.ndindex(*want.shape):
            unit = np.zeros_like(want)
            unit[at] = 1.0
            want[at] = _directional(f, arrays, i, unit)
        assert_close(got, want, dtype, scale, what)
        return
    for _ in range(3):
        v = rng.standard_normal(got.shape)
        want_slope, slope = _directional(f, arrays, i, v), float(np.sum(got * v))
        # Errors of the elements are independent: they add as their root of squares.
        size = float(np.linalg.norm(got) + np.sqrt(got.size) * np.max(np.abs(got)))
        bound = TOLERANCE[dtype] * scale * max(1.0, size, abs(want_slope))
        assert abs(slope - want_slope) <= bound, f"{what} in {dtype}: {slope} and {want_slope}"


def check(
    op: Callable[..., _core.Tensor],
    reference: Callable[..., np.ndarray],
    inputs: Sequence[np.ndarray],
    dtype: str,
    *,
    scale: float = 1.0,
    wrt: Sequence[int] | None = None,
    what: str = "operation",
) -> None:
    """Compare op's result and its gradients with the reference's."""
    rng = np.random.default_rng(7)
    pairs = [rounded(x, dtype) for x in inputs]
    tensors, arrays = [p[0] for p in pairs], [p[1] for p in pairs]
    wanted = range(len(inputs)) if wrt is None else wrt
    for i in wanted:
        tensors[i].requires_grad = True
    y = op(*tensors)
    want = np.asarray(reference(*arrays), dtype=np.float64)
    assert_close(values(y), want, dtype, scale, f"{what}: forward")
    cotangent, g = rounded(rng.standard_normal(want.shape), y.dtype)
    y.backward(cotangent)

    def weighted(*xs: np.ndarray) -> float:
        return float(np.sum(np.asarray(reference(*xs)) * g))

    for i in wanted:
        grad = tensors[i].grad
        assert grad is not None, f"{what}: input {i} got no gradient"
        assert grad.dtype is tensors[i].dtype
        name = f"{what}: gradient of input {i}"
        _assert_gradient(values(grad), weighted, arrays, i, dtype, 2 * scale, name, rng)
