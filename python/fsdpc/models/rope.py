"""Rotary frequencies, plain or scaled for longer sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How to scale rotary frequencies for sequences longer than those in pretraining.

    Parameters
    ----------
    kind : "linear" or "llama3"
        "linear" divides all frequencies by the factor. "llama3" divides only low frequencies, with
        a ramp in between, as in LLaMA 3.1.
    factor : float
        At least 1.
    low_freq_factor, high_freq_factor : float
        For "llama3": number of turns within ``original_max_seq`` at which the ramp begins and ends.
    original_max_seq : int
        For "llama3": longest sequence of pretraining, in tokens.

    Raises
    ------
    ValueError
        The kind is unknown, or a number is out of range.

    Examples
    --------
    >>> from fsdpc.models import RopeScaling
    >>> RopeScaling(kind="linear", factor=2.0).factor
    2.0
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(
                f"rope scaling '{self.kind}' is not implemented; there are linear and llama3"
            )
        if not self.factor >= 1:
            raise ValueError(f"the factor of rope scaling must be at least 1, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.original_max_seq < 1:
            raise ValueError(f"original_max_seq must be at least 1, got {self.original_max_seq}")

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Return scaled frequencies in radians per token: float32, shape (dim / 2)."""
        factor = np.float32(self.factor)
        if self.kind == "linear":
            return frequencies / factor
        turns = np.float32(self.original_max_seq) * frequencies / np.float32(2 * math.pi)
        low, high = np.float32(self.low_freq_factor), np.float32(self.high_freq_factor)
        share = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
        return (1 - share) * frequencies / factor + share * frequencies


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return a head's rotary frequencies in radians per token: float32, shape (head_dim / 2)."""
    exponents = np.arange(0, head_dim // 2, dtype=np.float32) * np.float32(2)
    plain = (1.0 / theta ** (exponents / np.float32(head_dim))).astype(np.float32)
    return plain if scaling is None else scaling.apply(plain)
