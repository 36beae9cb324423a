"""Optimizers beside torch's, one thread; and the whole update: clip, step, publish, reset.

torch has no Lion: its column there is SGD with momentum, fused, which moves the same bytes.

python benchmarks/bench_optim.py [--powers 20 22 24 26] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["FSDPC_THREADS"] = "1"

import numpy as np
import torch

import fsdpc
from fsdpc import _core

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common


def step_pair(
    ours: Callable[[Any], Any], theirs: Callable[[Any], Any]
) -> Callable[[int], dict[str, object]]:
    """Steps of one parameter that is not sharded: one kernel call against torch's."""

    def pair(n: int) -> dict[str, object]:
        g = np.random.default_rng(0).standard_normal(n).astype(np.float32)
        p = fsdpc.nn.Parameter(g.copy())
        p.grad = _core.tensor(g)
        other = torch.nn.Parameter(torch.from_numpy(g.copy()))
        other.grad = torch.from_numpy(g.copy())
        optimizers = {"fsdpc": ours([p]), "torch": theirs([other])}

        def timed(which: str) -> float:
            t = time.perf_counter()
            optimizers[which].step()
            return time.perf_counter() - t

        return {which: partial(timed, which) for which in optimizers}

    return pair


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
    optim, torchs = fsdpc.optim, torch.optim
    momentum = partial(torchs.SGD, lr=1e-3, momentum=0.9, fused=True)
    pairs = [
        ("AdamW", step_pair(optim.AdamW, partial(torchs.AdamW, fused=True))),
        ("SGD momentum (torch: fused)", step_pair(partial(optim.SGD, momentum=0.9), momentum)),
        ("SGD momentum (torch: foreach)", step_pair(
            partial(optim.SGD, momentum=0.9),
            partial(torchs.SGD, lr=1e-3, momentum=0.9, foreach=True))),
        ("Lion (torch: SGD momentum)", step_pair(optim.Lion, momentum)),
        ("AdamW, bf16 states (torch: fp32)", step_pair(
            partial(optim.AdamW, state_dtype=fsdpc.bfloat16), partial(torchs.AdamW, fused=True))),
        ("clip + AdamW + publish + reset", update_pair),
    ]  # fmt: skip
    for what, pair in pairs:
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
