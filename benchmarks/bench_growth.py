"""How the time of a step grows with ranks and with units, at a fixed size; a table and a PNG.

    python benchmarks/bench_growth.py [--png benchmarks/growth.png] [--rounds 3]

Ranks 1, 2, 4 train the 10M LLaMA on the same global batch. Units 1 to 64 share out the same 4
million parameters, on 2 ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

RANKS, UNITS = (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)


def turn(what: str, count: int) -> None:
    """Median milliseconds of a step on this rank."""
    import fsdpc
    from fsdpc import models, nn

    fsdpc.init()
    fsdpc.manual_seed(0)
    rng = np.random.default_rng(fsdpc.rank())
    model: Any
    if what == "ranks":
        config = models.preset("10M")
        model = models.Llama(config)
        blocks = model.blocks()
        ids = rng.integers(0, 256, (4 // fsdpc.world_size(), 257))
        arguments = (np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]))
    else:
        layers = [nn.Linear(256, 256, bias=False) for _ in range(64)]
        groups = [nn.Sequential(*layers[i::count]) for i in range(count)]
        model, blocks = nn.Sequential(*groups), groups
        arguments = (fsdpc.tensor(rng.standard_normal((64, 256)).astype(np.float32)),)
    for block in blocks:
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for i in range(13):
        fsdpc.barrier()
        begin = time.perf_counter()
        result = model(*arguments)
        (result if result.ndim == 0 else (result * result).sum()).backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if i > 2:
            times.append((time.perf_counter() - begin) * 1e3)
    common.leave_result({"ms": statistics.median(times)})


def main() -> None:
    """Print the table and draw the figure."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--png", type=Path, default=common.ROOT / "benchmarks" / "growth.png")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        turn(o.turn[0], int(o.turn[1]))
        return
    common.header()
    results: dict[str, dict[int, list[float]]] = {"ranks": {}, "units": {}}
    for _ in range(o.rounds):
        for what, counts in (("ranks", RANKS), ("units", UNITS)):
            for count in counts:
                ranks = count if what == "ranks" else 2
                ms = common.run_ranks(__file__, ["--turn", what, str(count)], ranks)["ms"]
                results[what].setdefault(count, []).append(ms)
    rows = [
        [f"{count} {what}", common.spread(ms)]
        for what, by_count in results.items()
        for count, ms in by_count.items()
    ]
    common.table(["step", "ms (range)"], rows)
    draw(results, o.png)


def draw(results: dict[str, dict[int, list[float]]], path: Path) -> None:
    """Two panels: over ranks and over units."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    titles = {"ranks": "10M LLaMA, global batch 4 x 256", "units": "4 M parameters, 2 ranks"}
    for axis, (what, by_count) in zip(axes, results.items(), strict=True):
        counts = sorted(by_count)
        axis.plot(counts, [statistics.median(by_count[c]) for c in counts], marker="o")
        axis.set(xlabel=what, ylabel="ms a step", title=titles[what], ylim=(0, None), xscale="log")
        axis.set_xticks(counts, [str(c) for c in counts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
