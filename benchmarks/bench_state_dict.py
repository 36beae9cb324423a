"""What full state dicts of torch models cost, next to FSDP2's and to the first touch of memory.

    python benchmarks/bench_state_dict.py [--mib 256 1024] [--ranks 2]

A model of linear layers of 4 MiB, four a unit, makes one training step. Then each rank calls
``get_model_state_dict`` twice and drops the result. The first result is often in fresh memory,
whose pages the kernel zeroes; "first touch" fills as much fresh memory, outside of torch.
"""

from __future__ import annotations

import argparse
import mmap
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

SIDE, LAYERS = 1024, 4


def cost(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def touch(size: int) -> None:
    """Write every page of new memory."""
    with mmap.mmap(-1, size) as memory:
        memory.write(bytes(1 << 20) * (size >> 20))


def rank(kind: str, mib: int) -> None:
    """Measure one kind on this rank."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    units = mib // (LAYERS * SIDE * SIDE * 4 >> 20)
    model: Any = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
          for _ in range(units))
    )  # fmt: skip
    if kind == "fsdpc":
        import fsdpc
        from fsdpc.torch import fully_shard, get_model_state_dict

        fsdpc.init()
        get, end = get_model_state_dict, fsdpc.shutdown
    else:
        import torch.distributed as dist
        from torch.distributed.checkpoint import state_dict as theirs
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        options = theirs.StateDictOptions(full_state_dict=True)

        def get(model: Any) -> Any:
            return theirs.get_model_state_dict(model, options=options)

        end = dist.destroy_process_group
    for unit in (*model, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.randn(2, SIDE)).sum().backward()
    optimizer.step()
    found = {name: cost(lambda: get(model)) for name in ("first", "later")}
    found["first touch"] = cost(lambda: touch(mib << 20))
    common.leave_result(found)
    end()


def main() -> None:
    """Measure each size, both kinds in turn."""
    p = argparse.ArgumentParser()
    p.add_argument("--mib", type=int, nargs="+", default=[256, 1024])
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--kind", choices=("fsdpc", "fsdp2"), help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.kind:
        rank(o.kind, o.mib[0])
        return
    common.header()
    rows = []
    for mib in o.mib:
        for kind in ("fsdpc", "fsdp2"):
            found = common.run_ranks(__file__, ["--kind", kind, "--mib", str(mib)], o.ranks)
            cells = [f"{found[n][1]:.3f} ({found[n][0]:.3g})"
                     for n in ("first", "later", "first touch")]  # fmt: skip
            rows.append([f"{mib} MiB", kind, *cells])
    common.table(["full state dict", "of", "first, processor (clock) s", "later", "first touch"],
                 rows)  # fmt: skip


if __name__ == "__main__":
    main()
