"""Matrix products on one core next to torch's (oneDNN) and NumPy's (OpenBLAS), for a linear layer.

    python benchmarks/bench_gemm.py [--shapes 512 2048x256x768] [--rounds 7]

A shape is rows x outputs x inputs, or one number for a cube. All sides are called from Python on
their own tensors, in turn, one thread each; NumPy has no bf16. Times are of
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
from math import prod
from pathlib import Path

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "FSDPC_THREADS"), "1")

import numpy as np
import torch

from fsdpc import _core

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

SHAPES = ("512", "1024", "2048", "512x1024x256", "2048x256x768")


def seconds(call: Callable[[], object], least: float = 0.05) -> float:
    """The best processor time of a call, repeated for `least` seconds of it."""
    best, begin = float("inf"), time.thread_time()
    while time.thread_time() - begin < least:
        t = time.thread_time_ns()
        call()
        best = min(best, (time.thread_time_ns() - t) / 1e9)
    return best


def calls(shape: tuple[int, ...], dtype: str) -> dict[str, dict[str, Callable[[], object]]]:
    """Form -> engine -> its call; ours through the operations that training runs."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (n, k), (m, n)))
    ox, ow, ody = (_core.tensor(v).to(dtype) for v in (x, w, dy))
    tx, tw, tdy = (torch.from_numpy(v).to(getattr(torch, dtype)) for v in (x, w, dy))
    wt = _core.tensor(w).to(dtype)
    wt.requires_grad = True
    y = _core.linear(ox, wt)  # its backward is only dy^T x, as x needs no gradient
    found: dict[str, dict[str, Callable[[], object]]] = {
        "x W^T": {"fsdpc": lambda: _core.linear(ox, ow), "torch": lambda: tx @ tw.T},
        "dy W": {"fsdpc": lambda: _core.matmul(ody, ow), "torch": lambda: tdy @ tw},
        "dy^T x": {
            "fsdpc": lambda: y.backward(ody, retain_graph=True),
            "torch": lambda: tdy.T @ tx,
        },
    }
    if dtype == "float32":
        found["x W^T"]["NumPy"] = lambda: x @ w.T
        found["dy W"]["NumPy"] = lambda: dy @ w
        found["dy^T x"]["NumPy"] = lambda: dy.T @ x
    return found


def as_shape(text: str) -> tuple[int, ...]:
    """Return (rows, outputs, inputs)."""
    sizes = tuple(map(int, text.split("x")))
    if len(sizes) not in (1, 3):
        raise argparse.ArgumentTypeError(f"{text}: give rows x outputs x inputs, or one number")
    return sizes * (3 // len(sizes))


def best(rates: list[float]) -> str:
    """The best rate with the median behind it."""
    return f"{max(rates):.0f} ({statistics.median(rates):.0f})"


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shapes", nargs="+", type=as_shape, default=list(map(as_shape, SHAPES)))
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--rounds", type=int, default=7)
    o = p.parse_args()
    torch.set_num_threads(1)
    common.header()
    rows = []
    for dtype in o.dtypes:
        for shape in o.shapes:
            for form, engines in calls(shape, dtype).items():
                with torch.no_grad():
                    t = common.alternate(
                        {name: lambda c=call: seconds(c) for name, call in engines.items()},
                        o.rounds,
                    )
                rate = {k: [2 * prod(shape) / s / 1e9 for s in v] for k, v in t.items()}
                peers = {name: max(v) for name, v in rate.items() if name != "fsdpc"}
                rows.append([f"{dtype} {form} {'x'.join(map(str, shape))}", best(rate["fsdpc"]),
                             *(best(rate[n]) if n in rate else "" for n in ("torch", "NumPy")),
                             f"{max(rate['fsdpc']) / max(peers.values()):.2f}"])  # fmt: skip
    head = ["product, one core, GFLOP/s", "fsdpc", "torch", "NumPy", "over the best peer"]
    common.table(head, rows)
    print(f"\nbest (median of {o.rounds}); load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
