"""AdamW beside torch's fused one, one thread; and the whole update: clip, step, publish, reset.

python benchmarks/bench_optim.py [--powers 20 22 24 26] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["FSDPC_THREADS"] = "1"

import numpy as np
import torch

import fsdpc
from fsdpc import _core

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common


def plain_pair(n: int) -> dict[str, object]:
    """One kernel call against torch's fused step, gradients as they are."""
    g = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    p, grad, m, v = (_core.tensor(a) for a in (g.copy(), g, np.zeros_like(g), np.zeros_like(g)))
    theirs = torch.nn.Parameter(torch.from_numpy(g.copy()))
    theirs.grad = torch.from_numpy(g.copy())
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, fused=True)
    step = [0]

    def ours() -> float:
        step[0] += 1
        t = time.perf_counter()
        _core.adamw_(p, grad, m, v, step[0], 1e-3, 0.9, 0.999, 1e-8, 0.01, False)
        return time.perf_counter() - t

    def torchs() -> float:
        t = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - t

    return {"fsdpc": ours, "torch": torchs}


class Rows(fsdpc.nn.Module):
    """A module whose gradient is cheap, so that the update is what is measured."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = fsdpc.nn.Parameter(_core.randn(n // 1024, 1024, seed=1))

    def forward(self) -> fsdpc.Tensor:
        return (self.weight * self.weight).sum()


def update_pair(n: int) -> dict[str, object]:
    """clip_grad_norm_ + step + zero_grad; ours also writes what the next forward reads."""
    model = fsdpc.fully_shard(Rows(n))
    ours_optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.nn.Parameter(torch.randn(n // 1024, 1024))
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, fused=True)
    grad = torch.randn(n // 1024, 1024)

    def ours() -> float:
        model().backward()
        t = time.perf_counter()
        fsdpc.clip_grad_norm_(model, 1.0)
        ours_optimizer.step()
        ours_optimizer.zero_grad()
        return time.perf_counter() - t

    def torchs() -> float:
        theirs.grad = grad.clone()
        t = time.perf_counter()
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - t

    return {"fsdpc": ours, "torch": torchs}


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--powers", nargs="+", type=int, default=[20, 22, 24, 26])
    p.add_argument("--rounds", type=int, default=7)
    o = p.parse_args()
    torch.set_num_threads(1)
    common.header()
    rows = []
    for what, pair in (("AdamW step", plain_pair), ("clip + step + publish + reset", update_pair)):
        for power in o.powers:
            runs = pair(2**power)
            common.alternate(runs, 2)  # first touches
            t = common.alternate(runs, o.rounds)
            ms = {k: [s * 1e3 for s in v] for k, v in t.items()}
            ratio = statistics.median(ms["torch"]) / statistics.median(ms["fsdpc"])
            rows.append([f"{what}, 2^{power} fp32", common.spread(ms["fsdpc"]),
                         common.spread(ms["torch"]), f"{ratio:.2f}"])  # fmt: skip
    common.table(["one thread", "fsdpc ms", "torch ms", "torch's time over ours"], rows)


if __name__ == "__main__":
    main()
