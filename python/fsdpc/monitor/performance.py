"""Measure a run's speed in tokens and FLOPs per second, and as a fraction of the peak.

There are several ways to count FLOPs. :data:`FORMULAS` contains ours and those from published
studies. The formulas differ in whether they count the output layer and the half of the attention
matrix that is masked. Compare MFU values only if they use the same formula and peak.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fsdpc import _core, distributed
from fsdpc.tensors.grad_mode import no_grad

# Matrix products of doubling size are timed until one takes at least this long.
_PRODUCT_SECONDS = 2e-3
_PRODUCT_SIZES = (96, 4096)

#: FLOP/s of common devices in dense bfloat16 products (V100, T4: float16), from vendors' data
#: sheets. If a device's name contains several of these names, the longest applies.
PEAKS: dict[str, float] = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12,
    "T4": 65e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI250X": 383e12, "MI300X": 1307e12,
}  # fmt: skip


class _Shape(NamedTuple):
    dim: int
    mlp: int  # parameters in all blocks' products
    attention: int  # parameters in the projections
    head: int  # parameters in the output layer, tied or not
    scores: int  # layers x heads x head size


#: Training FLOPs per token in a sequence of s tokens, forward and backward, by formula.
FORMULAS: dict[str, Callable[[_Shape, int], float]] = {
    "fsdpc": lambda m, s: 6.0 * (m.mlp + m.attention + m.head) + 6.0 * m.scores * s,
    "palm": lambda m, s: 6.0 * (m.mlp + m.attention + m.head) + 12.0 * m.scores * s,
    "blocks": lambda m, s: 6.0 * (m.mlp + m.attention) + 12.0 * m.scores * s,
    "accelerate": lambda m, s: 6.0 * (m.mlp + m.attention / m.dim) + 12.0 * m.scores * s,
    "kaplan": lambda m, s: 6.0 * (m.mlp + m.attention),
}


def flops_per_token(config: Any, seq: int, formula: str = "fsdpc") -> float:
    """Count the training FLOPs per token.

    Parameters
    ----------
    config : ModelConfig, or a configuration of transformers'
        The configuration of a LLaMA-like model: three matrices per feed-forward block, grouped
        queries.
    seq : int
        Tokens per sequence.
    formula : {"fsdpc", "palm", "blocks", "accelerate", "kaplan"}
        "fsdpc": 6 per parameter in a product, including the output layer, and the causal half of
        attention. "palm": all of attention. "blocks": all of attention, without the output layer.
        "accelerate": like Accelerate's FSDP2 example. "kaplan": 6 per parameter in the blocks.

    Returns
    -------
    float
        FLOPs in forward and backward, without recomputation.

    Raises
    ------
    ValueError
        The formula is unknown.

    Notes
    -----
    Sources: Chowdhery et al. 2022, "PaLM", appendix B; Kaplan et al. 2020, "Scaling Laws for Neural
    Language Models"; Accelerate's examples/fsdp2. For SmolLM3-3B at 8,192 tokens, the published
    value is 24.12 GFLOP per token, which is "blocks": (18 d f + 12 d h (H + K) + 12 H h s) L, with
    width d, inner width f, H heads and K key heads of size h, L layers. It omits the tied output
    layer (1.58 GFLOP) and includes the masked half of attention (3.62), so ours is 22.07.
    Accelerate's function lacks d in the projections' term and returns 21.86.

    Examples
    --------
    >>> from fsdpc.models import preset
    >>> [round(flops_per_token(preset("SmolLM3-3B"), 8192, f) / 1e9, 2) for f in FORMULAS]
    [22.07, 25.7, 24.12, 21.86, 16.87]
    """
    if formula not in FORMULAS:
        raise ValueError(f"no formula '{formula}'; there are {', '.join(FORMULAS)}")
    return FORMULAS[formula](_shape(config), seq)


def _shape(config: Any) -> _Shape:
    def take(ours: str, theirs: str, default: int | None = None) -> int:
        found = getattr(config, ours, None) or getattr(config, theirs, None) or default
        if found is None:
            raise ValueError(f"{type(config).__name__} has neither '{ours}' nor '{theirs}'")
        return int(found)

    dim, layers = take("dim", "hidden_size"), take("layers", "num_hidden_layers")
    heads = take("heads", "num_attention_heads")
    kv_heads = take("kv_heads", "num_key_value_heads", heads)
    size = take("head_dim", "head_dim", dim // heads)
    mlp, projections = 3 * dim * take("inner", "intermediate_size"), 2 * size * (heads + kv_heads)
    head = dim * take("vocab_size", "vocab_size")
    return _Shape(dim, layers * mlp, layers * dim * projections, head, layers * heads * size)


@no_grad()
def measure_peak(dtype: Any = None) -> float:
    """Measure the FLOP/s that this rank reaches in matrix products with fsdpc's kernels.

    Parameters
    ----------
    dtype : dtype, default float32
        Dtype of the products.

    Returns
    -------
    float
        FLOP/s of the first square product, among doubling sizes, that takes 2 ms; best of four
        runs.
    """
    n, best = _PRODUCT_SIZES[0], 0.0
    while best < _PRODUCT_SECONDS and n <= _PRODUCT_SIZES[1]:
        n, best = 2 * n, math.inf
        a, b = (_core.randn(n, n, seed=i).to(dtype or _core.float32) for i in (1, 2))
        for _ in range(4):
            begin = time.perf_counter()
            _core.matmul(a, b)[0, 0].item()  # waits for the GPU
            best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


def peak_of(name: str) -> float:
    """Return the peak FLOP/s of a device whose name contains a key of :data:`PEAKS`.

    Raises
    ------
    ValueError
        The name contains none of them.

    Examples
    --------
    >>> peak_of("NVIDIA H100 PCIe") / 1e12, peak_of("NVIDIA H100 80GB HBM3") / 1e12
    (756.0, 989.0)
    """
    words = f" {name.replace('-', ' ').lower()} "
    for known in sorted(PEAKS, key=len, reverse=True):
        if f" {known.lower()} " in words:
            return PEAKS[known]
    raise ValueError(f"no peak of '{name}' is known; give FLOP/s, or one of {', '.join(PEAKS)}")


class PerformanceTracker:
    """Measures a run's speed, excluding its first steps.

    Parameters
    ----------
    flops_per_token : float, optional
        As counted by :func:`flops_per_token`; without it, no FLOP/s are reported.
    peak : float or str, optional
        Peak FLOP/s of one rank, or a device's name (see :func:`peak_of`); for a measured peak, pass
        the result of :func:`measure_peak`. Without it, no MFU is reported.
    warmup : int, default 3
        Steps to skip: first memory accesses, cold caches, and schedule recording.

    Notes
    -----
    It neither communicates nor waits for a GPU: call :meth:`step` after reading the loss. All ranks
    are assumed to have the same number of tokens.

    Examples
    --------
    >>> tracker = PerformanceTracker(flops_per_token=6e6, peak="A100", warmup=1)
    >>> for _ in range(3):
    ...     seen = tracker.step(512)
    >>> seen["steps"], seen["tokens"]
    (2, 1024)
    """

    def __init__(
        self,
        flops_per_token: float | None = None,
        peak: float | str | None = None,
        warmup: int = 3,
    ) -> None:
        if warmup < 0:
            raise ValueError(f"warmup must be at least 0, got {warmup}")
        self.flops_per_token: float | None = flops_per_token
        self.warmup: int = warmup
        self.peak: float | None = peak_of(peak) if isinstance(peak, str) else peak
        if self.peak is not None and not self.peak > 0:
            raise ValueError(f"peak must be above 0, got {self.peak}")
        self.restart()

    def restart(self) -> None:
        """Restart the measurement, for example after a pause for validation."""
        self._calls = self._tokens = 0
        self._begun = self._last = time.perf_counter()

    def step(self, tokens: int) -> dict[str, float]:
        """Record the end of a step.

        Parameters
        ----------
        tokens : int
            This rank's tokens in the step.

        Returns
        -------
        dict of str to float
            After the warm-up: ``steps``, ``tokens`` and ``seconds`` since then, the last
            ``step_seconds``, ``tokens_per_second`` over all ranks and ``..._rank`` for one,
            ``tflops_rank``, ``mfu`` and the values of :func:`memory_use`. During the warm-up, only
            the values of :func:`memory_use`.
        """
        now, last = time.perf_counter(), self._last
        self._calls, self._last = self._calls + 1, now
        if self._calls <= self.warmup:
            self._begun = now
            return memory_use()
        self._tokens += tokens
        seconds = max(now - self._begun, 1e-9)
        rate = self._tokens / seconds
        world = distributed.world_size() if distributed.is_initialized() else 1
        found = {
            "steps": self._calls - self.warmup, "tokens": self._tokens, "seconds": seconds,
            "step_seconds": now - last, "tokens_per_second": rate * world,
            "tokens_per_second_rank": rate,
        }  # fmt: skip
        if self.flops_per_token is not None:
            found["tflops_rank"] = rate * self.flops_per_token / 1e12
            if self.peak is not None:
                found["mfu"] = rate * self.flops_per_token / self.peak
        return {**found, **memory_use()}


def memory_use() -> dict[str, int]:
    """Return this rank's peak memory, using PyTorch's names.

    Returns
    -------
    dict of str to int
        ``memory_active`` and ``memory_allocated``: for the engine, both are the sum of its
        categories; for torch on a GPU, its allocator's values. ``memory_reserved`` also includes
        free memory kept for reuse. :func:`fsdpc.memory_stats` returns the engine's categories.
    """
    stats = _core.memory_stats()
    held = stats["total_peak_bytes"]
    found = {"active": held, "allocated": held, "reserved": held + stats["cached_bytes"]}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        theirs = torch.cuda.memory_stats()
        found = {name: n + theirs[f"{name}_bytes.all.peak"] for name, n in found.items()}
    return {f"memory_{name}": n for name, n in found.items()}
