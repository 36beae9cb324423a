"""Operations beside torch's, which computes in float64 what ours computes in a dtype.

Values and gradients (of the sum with random weights) are compared; tolerances are oracle.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from oracle import assert_close, rounded, values


def same_as_torch(
    op: Callable[..., Any],
    theirs: Callable[..., torch.Tensor],
    inputs: Sequence[np.ndarray],
    dtype: str = "float32",
    scale: float = 1.0,
    what: str = "operation",
) -> None:
    """Compare the result of op, and the gradient of every input, with torch's."""
    pairs = [rounded(x, dtype) for x in inputs]
    ours = [pair[0].requires_grad_() for pair in pairs]
    them = [torch.tensor(pair[1], requires_grad=True) for pair in pairs]
    y, want = op(*ours), theirs(*them)
    assert_close(values(y), want.detach().numpy(), dtype, scale, f"{what}: forward")
    weights = np.random.default_rng(5).standard_normal(tuple(want.shape))
    cotangent, g = rounded(weights, y.dtype)
    y.backward(cotangent)
    want.backward(torch.tensor(g))
    for i, (x, t) in enumerate(zip(ours, them, strict=True)):
        assert x.grad is not None and x.grad.dtype is x.dtype, f"{what}: input {i}"
        name = f"{what}: gradient of input {i}"
        assert_close(values(x.grad), t.grad.numpy(), dtype, 2 * scale, name)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape)
