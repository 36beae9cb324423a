"""Collectives of torch.distributed over the back ends "fsdpc" and "gloo", in turn.

    python benchmarks/bench_backend.py [--rounds 3] [--ranks 2 4]

Each call is timed from a barrier on. A message goes to the other rank and back; half is counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

SIZES = {"1 KiB": 1 << 10, "32 KiB": 1 << 15, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "message")


def calls(n_bytes: int, rank: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return one call of each kind on tensors of this size in all."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(n_bytes // 4)
    part, other = torch.ones(n_bytes // 4 // ranks), torch.empty(n_bytes // 4)

    def message() -> None:
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(other, 1)
        elif rank == 1:
            dist.recv(other, 0)
            dist.send(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "message": message,
    }


def turn(backend: str) -> None:
    """Time one back end on this rank; leave medians in microseconds."""
    import torch
    import torch.distributed as dist

    import fsdpc.torch  # registers ours

    assert fsdpc.torch
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{os.environ['BENCH_STORE']}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    result = {}
    for name, n_bytes in SIZES.items():
        for kind, call in calls(n_bytes, rank, ranks).items():
            times = []
            for _ in range(60 if n_bytes < 1 << 22 else 8):
                dist.barrier()
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e6)
            result[f"{kind} {name}"] = statistics.median(times[2:]) / (1 + (kind == "message"))
    common.leave_result(result)
    dist.barrier()


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    p.add_argument("--turn", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        turn(o.turn)
        return
    common.header()
    for ranks in o.ranks:
        found: dict[str, list[dict[str, float]]] = {"fsdpc": [], "gloo": []}
        for _ in range(o.rounds):
            for backend, turns in found.items():
                turns.append(common.run_ranks(__file__, ["--turn", backend], ranks, sample=False))
        rows = []
        for key in (f"{kind} {name}" for kind in KINDS for name in SIZES):
            ours, gloo = ([t[key] for t in found[b]] for b in ("fsdpc", "gloo"))
            ratio = statistics.median(gloo) / statistics.median(ours)
            rows.append([key, common.spread(ours), common.spread(gloo), f"{ratio:.1f}"])
        common.table([f"{ranks} ranks", "fsdpc us", "gloo us", "gloo's time over ours"], rows)


if __name__ == "__main__":
    main()
