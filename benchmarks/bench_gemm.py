"""Matrix products on one core beside torch's (oneDNN): the three forms of a linear layer.

    python benchmarks/bench_gemm.py [--sizes 512 1024 2048] [--rounds 7]

Both sides are called from Python on tensors of their own, in turn, one thread each. Times are of
the thread's processor time, and each side's best counts, so that other processes disturb less; the
median of the rounds stands beside it. `make bench` prints the share of the processor's peak (an
FMA or tile loop) from C.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["FSDPC_THREADS"] = "1"

import numpy as np
import torch

from fsdpc import _core

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common


def seconds(call: Callable[[], object], least: float = 0.05) -> float:
    """The best processor time of a call, repeated for `least` seconds of it."""
    best, begin = float("inf"), time.thread_time()
    while time.thread_time() - begin < least:
        t = time.thread_time_ns()
        call()
        best = min(best, (time.thread_time_ns() - t) / 1e9)
    return best


def calls(n: int, dtype: str) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Form -> (ours, torch's); ours through the operations that training runs."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    ours = [_core.tensor(v).to(dtype) for v in (a, b)]
    theirs = [torch.from_numpy(v).to(getattr(torch, dtype)) for v in (a, b)]
    x, w = ours
    tx, tw = theirs
    wt = _core.tensor(b).to(dtype)
    wt.requires_grad = True
    y = _core.linear(x, wt)  # its backward is dy^T x alone, as x needs no gradient
    return {
        "x W^T": (lambda: _core.linear(x, w), lambda: tx @ tw.T),
        "dy W": (lambda: _core.matmul(x, w), lambda: tx @ tw),
        "dy^T x": (lambda: y.backward(x, retain_graph=True), lambda: tx.T @ tw),
    }


def best(rates: list[float]) -> str:
    """The best rate with the median behind it."""
    return f"{max(rates):.0f} ({statistics.median(rates):.0f})"


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 2048])
    p.add_argument("--rounds", type=int, default=7)
    o = p.parse_args()
    torch.set_num_threads(1)
    common.header()
    rows = []
    for dtype in ("float32", "bfloat16"):
        for n in o.sizes:
            for form, (ours, theirs) in calls(n, dtype).items():
                with torch.no_grad():
                    t = common.alternate(
                        {"fsdpc": lambda c=ours: seconds(c), "torch": lambda c=theirs: seconds(c)},
                        o.rounds,
                    )
                rate = {k: [2 * n**3 / s / 1e9 for s in v] for k, v in t.items()}
                ratio = max(rate["fsdpc"]) / max(rate["torch"])
                rows.append([f"{dtype} {form} {n}^3", best(rate["fsdpc"]), best(rate["torch"]),
                             f"{ratio:.2f}"])  # fmt: skip
    common.table(["product, one core", "fsdpc GFLOP/s", "torch GFLOP/s", "ratio of best"], rows)
    print(f"\nbest (median of {o.rounds}); load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
