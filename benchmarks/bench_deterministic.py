"""What deterministic mode adds to a step, two models of one process stepping in turns.

    python benchmarks/bench_deterministic.py [--presets 10M 41M] [--dtypes fp32 bf16] [--steps 30]

FULL_SHARD on 2 ranks of one thread each; a step is forward, backward, clipping at 1.0 and AdamW.
The two models take turns step by step, so that a machine that drifts treats both alike: the
difference of turns of whole processes would be lost in their ranges. Told are the median step of
each, and the median over pairs of what the mode adds, with the middle half of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from bench_llama import BATCHES, WARM, fsdpc_step

MODES = ("plain", "deterministic")
REDUCE = ("fp32", "bf16")


def turn(preset: str, dtype: str, reduce: str, steps: int) -> dict[str, Any]:
    """Run both on this rank: seconds of each step, plain and deterministic."""
    import fsdpc
    from fsdpc import distributed

    fsdpc.init()
    plain = fsdpc_step(preset, dtype, reduce)
    # fully_shard() asks for the mode once, so one process can hold a model of either kind.
    distributed.group._deterministic = True
    runs = {"plain": plain, "deterministic": fsdpc_step(preset, dtype, reduce)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(WARM + steps):
        for name in sorted(runs, reverse=i % 2 == 1):
            begin = time.perf_counter()
            runs[name]()
            if i >= WARM:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Run all models and print the rows."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--presets", nargs="+", default=["10M", "41M"], choices=list(BATCHES))
    p.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--turn", nargs=3, metavar=("PRESET", "DTYPE", "REDUCE"), help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        common.leave_result(turn(*o.turn, o.steps))
        return
    common.header()
    rows = []
    for preset in o.presets:
        for dtype in o.dtypes:
            for reduce in REDUCE if dtype == "bf16" else REDUCE[:1]:
                arguments = ["--turn", preset, dtype, reduce, "--steps", str(o.steps)]
                both = common.run_ranks(__file__, arguments, 2)
                added = [
                    d / a - 1 for a, d in zip(*(both[n] for n in MODES), strict=True)
                ]
                low, middle, high = statistics.quantiles(added, n=4)
                rows.append([
                    f"Llama {preset} {dtype}", reduce,
                    *(f"{statistics.median(both[n]) * 1e3:.3g}" for n in MODES),
                    f"{middle:+.1%} ({low:+.1%}..{high:+.1%})",
                ])  # fmt: skip
    common.table(["model", "reduced in", "plain ms", "deterministic ms", "added"], rows)


if __name__ == "__main__":
    main()
