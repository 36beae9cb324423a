"""Token positions for rotary embeddings."""

from __future__ import annotations

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor


def rotary_tables(tokens: int, dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines for :func:`rotary`, as float32 of shape (tokens, dim/2).

    Examples
    --------
    >>> from fsdpc import functional as F, tensor
    >>> cos, sin = F.rotary_tables(tokens=8, dim=4)
    >>> cos.shape, sin.shape
    ((8, 2), (8, 2))
    """
    frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    # e^i(a+b) = e^ia e^ib: float64 products replace most cosines and sines.
    near, far = np.arange(64)[:, None], np.arange(0, tokens, 64)[:, None, None]
    turns = np.exp(1j * far * frequencies) * np.exp(1j * near * frequencies)
    turns = turns.reshape(64 * len(far), len(frequencies))[:tokens]
    cos, sin = turns.real.astype(np.float32), turns.imag.astype(np.float32)
    return _core.tensor(cos), _core.tensor(sin)
