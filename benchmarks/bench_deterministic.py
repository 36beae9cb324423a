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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from bench_llama import BATCHES, WARM, batch

MODES = ("plain", "deterministic")
REDUCE = ("fp32", "bf16")


def stepper(preset: str, dtype: str, reduce: str) -> Callable[[], None]:
    """A model as the mode of the moment makes it, and its step."""
    import fsdpc
    from fsdpc import models

    config = models.preset(preset)
    fsdpc.manual_seed(0)
    with fsdpc.deferred_init():
        model = models.Llama(config)
    policy = fsdpc.MixedPrecisionPolicy(
        param_dtype=fsdpc.bfloat16 if dtype == "bf16" else None,
        reduce_dtype=fsdpc.bfloat16 if reduce == "bf16" else fsdpc.float32,
    )
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=policy)
    fsdpc.fully_shard(model, mp_policy=policy)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=3e-4)
    x, y = batch(preset, config.vocab_size)

    def step() -> None:
        optimizer.zero_grad()
        fsdpc.barrier()
        model(x, y).backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()

    return step


def turn(preset: str, dtype: str, reduce: str, steps: int) -> dict[str, Any]:
    """Run both on this rank: seconds of each step, plain and deterministic."""
    import fsdpc
    from fsdpc import distributed

    fsdpc.init()
    plain = stepper(preset, dtype, reduce)
    # fully_shard() asks for the mode once, so one process can hold a model of either kind.
    distributed._deterministic = True
    runs = {"plain": plain, "deterministic": stepper(preset, dtype, reduce)}
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
