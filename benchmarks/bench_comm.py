"""Collectives of two ranks beside gloo's: gather, reduce-scatter, all-reduce, barrier.

    python benchmarks/bench_comm.py [--rounds 5]

fsdpc's gather and reduce-scatter are those of training, timed in C by benchmarks/c/bench_comm.c (a
gather looks at shared memory and copies nothing); run from here in turn with gloo's in torch.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
KINDS = ("gather", "reduce-scatter")


def gloo_turn() -> None:
    """Times gloo on this rank and leaves medians in microseconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['BENCH_STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=2,
    )
    result = {}
    for name, size in SIZES.items():
        full, half = torch.ones(size // 4), torch.ones(size // 8)
        calls = {
            "gather": lambda full=full, half=half: dist.all_gather_into_tensor(full, half),
            "reduce-scatter": lambda full=full, half=half: dist.reduce_scatter_tensor(half, full),
        }
        for kind, call in calls.items():
            times = []
            for i in range(40 if size < 1 << 22 else 8):
                dist.barrier()
                t = time.perf_counter()
                call()
                if i > 1:
                    times.append((time.perf_counter() - t) * 1e6)
            result[f"{kind} {name}"] = statistics.median(times)
    common.leave_result(result)


def fsdpc_turn() -> dict[str, float]:
    """Run the C benchmark (built where needed) and read its medians."""
    build = [sys.executable, "tools/ctest.py", "bench", "bench_comm"]
    text = subprocess.run(build, cwd=common.ROOT, capture_output=True, text=True, check=True).stdout
    names = {size: name for name, size in SIZES.items()}
    kinds = {"gather, 30 slices": "gather", "reduce_scatter fp32": "reduce-scatter"}
    result = {}
    for line in text.splitlines():
        found = re.match(r"(.+?)\s+(\d+) bytes .*median\s+([\d.]+) us", line)
        if found and found[1] in kinds:
            result[f"{kinds[found[1]]} {names[int(found[2])]}"] = float(found[3])
    return result


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        gloo_turn()
        return
    common.header()
    ours: list[dict[str, float]] = []
    gloo: list[dict[str, float]] = []
    for _ in range(o.rounds):
        ours.append(fsdpc_turn())
        gloo.append(common.run_ranks(__file__, ["--turn"], 2))
    rows = []
    for kind in KINDS:
        for name in SIZES:
            key = f"{kind} {name}"
            a, b = [t[key] for t in ours], [t[key] for t in gloo]
            ratio = statistics.median(b) / statistics.median(a)
            rows.append([key, common.spread(a), common.spread(b), f"{ratio:.0f}"])
    common.table(["2 ranks, fp32", "fsdpc us", "gloo us", "gloo's time over ours"], rows)


if __name__ == "__main__":
    main()
