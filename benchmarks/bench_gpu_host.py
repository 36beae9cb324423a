"""What a unit costs the host at each step, on one GPU: fsdpc beside torch's FSDP2 and plain torch.

    python benchmarks/bench_gpu_host.py [--units 8 72] [--device cuda]

World 1. A model is a chain of equal Linear(64, 64), each a unit; a step is forward, backward,
clipping at 1.0 and AdamW over 8 rows. The GPU has next to nothing to do, so a step takes what the
host takes for it. The slope between two numbers of units is what one more unit costs; less plain
torch's slope, which has the same operations, it is what sharding costs. fsdpc's own tensors have
no such twin: their whole slope stands beside plain torch's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

ENGINES = ("torch", "fsdp2", "door", "native", "native+graph")
DIM, ROWS = 64, 8
WARM, STEPS, STRETCHES = 5, 20, 5
Step = Callable[[], Any]


def native(engine: str, units: int, device: str) -> tuple[Step, Step]:
    """A step of our own tensors, and a wait for it."""
    import fsdpc
    from fsdpc import nn

    fsdpc.set_default_device(device)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(units)))
    for layer in model:
        fsdpc.fully_shard(layer)
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)
    x = fsdpc.ones(ROWS, DIM)
    last: list[Any] = [None]

    def step() -> None:
        last[0] = (model(x) ** 2).mean()
        last[0].backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if engine.endswith("+graph"):
        for _ in range(2):
            step()
        with fsdpc.graph_step(model, optimizer) as graph:
            step()
        return graph.replay, lambda: float(last[0])
    return step, lambda: float(last[0])


def torch_engine(engine: str, units: int, device: str) -> tuple[Step, Step]:
    """A step of torch's tensors, and a wait for it."""
    import torch

    import fsdpc

    with torch.device(device):
        model = torch.nn.Sequential(*(torch.nn.Linear(DIM, DIM) for _ in range(units)))
        x = torch.ones(ROWS, DIM)
    clip, adamw, options = torch.nn.utils.clip_grad_norm_, torch.optim.AdamW, {"fused": True}
    if engine == "door":
        from fsdpc.torch import clip_grad_norm_, fully_shard, optim

        fsdpc.set_default_device(device)
        clip, adamw, options = clip_grad_norm_, optim.AdamW, {}
    elif engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    if engine != "torch":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = adamw(model.parameters(), lr=1e-3, **options)

    def step() -> None:
        (model(x) ** 2).mean().backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, torch.cuda.synchronize if device == "cuda" else lambda: None


def seconds(engine: str, units: int, device: str) -> list[float]:
    """Of one step, in each stretch."""
    make = native if engine.startswith("native") else torch_engine
    step, wait = make(engine, units, device)
    for _ in range(WARM):
        step()
    wait()
    return common.stretches(step, wait, STEPS, STRETCHES)


def main() -> None:
    """Measure every engine in this process, and print the rows."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--units", nargs=2, type=int, default=[8, 72])
    p.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    o = p.parse_args()
    common.header()
    few, many = o.units
    if {"torch", "fsdp2", "door"} & set(o.engines):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("nccl" if o.device == "cuda" else "gloo", rank=0, world_size=1,
                                store=dist.HashStore())
    plain = float("nan")
    common.table(["engine", f"ms a step, {few} units", f"{many} units", "us a unit and step",
                  "less plain torch's"], [])
    for engine in o.engines:
        try:
            short, long = (seconds(engine, n, o.device) for n in (few, many))
        except Exception as error:  # its row says why, and the others go on
            reason = f"{type(error).__name__}: {str(error)[:200]}".replace("|", "/")
            common.row([engine, reason, "", "", ""])
            continue
        slope = (statistics.median(long) - statistics.median(short)) / (many - few) * 1e6
        plain = slope if engine == "torch" else plain
        own = f"{slope - plain:.1f}" if engine in ("fsdp2", "door") else ""
        common.row([engine, common.spread([s * 1e3 for s in short]),
                    common.spread([s * 1e3 for s in long]), f"{slope:.1f}", own])


if __name__ == "__main__":
    main()
