"""How the time of every call grows with parameters, units and ranks; its exponent is at most 1.1.

    python benchmarks/bench_calls.py [--rounds 3] [--only fsdpc|torch|unsharded] [--axis ranks]

Layers are tiny (16 values), so that what a call does for each of them is all there is. Parameters
grow in 8 units, units hold 16 parameters each, both on 2 ranks. Ranks share the cores that there
are, so their exponent is that of one rank's share of the time, times cores by ranks. Peers are
ranks that pretend (the null communicator): what one rank does grows alone. An exponent is the slope
over the last three counts: 1 is linear. Calls that torch has are measured on the unsharded model
too, whose exponent excuses ours: beyond the caches, each parameter takes longer.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

RANKS = (1, 2, 4, 8, 16)
AXES = {"parameters": (50, 200, 800, 3200), "units": (8, 32, 128), "ranks": RANKS, "peers": RANKS}
WIDTH, MOST = 4, 1.1

Call = Callable[[], Any]


def timed(call: Call) -> float:
    """Milliseconds of one call that all ranks begin together."""
    import fsdpc

    fsdpc.barrier()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def shares(params: int, units: int) -> list[int]:
    """How many layers each unit has."""
    return [len(range(u, params, units)) for u in range(units)]


def native(params: int, units: int) -> tuple[Call, Any, dict[str, Call]]:
    """What shards a model of this package, the model, and the calls of a step and beside it."""
    import fsdpc
    from fsdpc import nn

    groups = [
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)])
        for n in shares(params, units)
    ]
    model: Any = nn.Sequential(*groups)
    x = fsdpc.tensor(np.ones((2, WIDTH), np.float32))
    held: dict[str, Any] = {}

    def shard() -> None:
        for group in groups:
            fsdpc.fully_shard(group)
        fsdpc.fully_shard(model)
        held["optimizer"] = fsdpc.optim.AdamW(model.parameters(), lr=1e-4)

    def forward() -> None:
        held["loss"] = model(x).mean()

    return shard, model, {
        "forward": forward,
        "backward": lambda: held["loss"].backward(),
        "clip": lambda: fsdpc.clip_grad_norm_(model, 1.0),
        "read every .grad": lambda: [p.grad for p in model.parameters()],
        "step": lambda: held["optimizer"].step(),
        "zero_grad": lambda: held["optimizer"].zero_grad(),
        "parameters()": lambda: list(model.parameters()),
        "state_dict": model.state_dict,
        "save": lambda: fsdpc.checkpoint.save(folder(), {"model": model, **only(held)}),
        "load": lambda: fsdpc.checkpoint.load(folder(), {"model": model, **only(held)}),
    }  # fmt: skip


def under_torch(params: int, units: int) -> tuple[Call, Any, dict[str, Call]]:
    """The same of a torch model, with torch's own calls on it."""
    import torch
    from torch import nn

    import fsdpc
    import fsdpc.torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.optim.SGD([torch.ones(1)])  # the first of a process imports torch's compiler: seconds
    groups = [
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)])
        for n in shares(params, units)
    ]
    model: Any = nn.Sequential(*groups)
    x = torch.ones(2, WIDTH)
    held: dict[str, Any] = {}

    def shard() -> None:
        for group in groups:
            fsdpc.torch.fully_shard(group)
        fsdpc.torch.fully_shard(model)
        held["optimizer"] = fsdpc.torch.optim.AdamW(model.parameters(), lr=1e-4)
        held["torch"] = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def forward() -> None:
        held["loss"] = model(x).mean()

    parameters = lambda: list(model.parameters())  # noqa: E731
    return shard, model, {
        "forward": forward,
        "backward": lambda: held["loss"].backward(),
        "torch's clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        "norm of each .grad": lambda: [p.grad.norm() for p in parameters()],
        "torch's clip by value": lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
        "clip": lambda: fsdpc.torch.clip_grad_norm_(model.parameters(), 1e-5),
        "read every .grad": lambda: [p.grad for p in parameters()],
        "torch's step": lambda: held["torch"].step(),
        "step": lambda: held["optimizer"].step(),
        "zero_grad": lambda: held["optimizer"].zero_grad(),
        "parameters()": parameters,
        "full_tensor of each": lambda: [p.full_tensor() for p in parameters()],
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(held["full"]),
        "save": lambda: fsdpc.checkpoint.save(folder(), {"model": model, **only(held)}),
        "load": lambda: fsdpc.checkpoint.load(folder(), {"model": model, **only(held)}),
    } | {"state_dict": lambda: held.update(full=model.state_dict())}  # fmt: skip


def plain(params: int, units: int) -> tuple[Call, Any, dict[str, Call]]:
    """The calls that torch has, on the same model in one process and unsharded."""
    import copy

    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    groups = [
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)])
        for n in shares(params, units)
    ]
    model: Any = nn.Sequential(*groups)
    x = torch.ones(2, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    held: dict[str, Any] = {}
    parameters = lambda: list(model.parameters())  # noqa: E731
    return lambda: None, model, {
        "forward": lambda: held.update(loss=model(x).mean()),
        "backward": lambda: held["loss"].backward(),
        "torch's clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        "norm of each .grad": lambda: [p.grad.norm() for p in parameters()],
        "torch's clip by value": lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
        "read every .grad": lambda: [p.grad for p in parameters()],
        "torch's step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "parameters()": parameters,
        "state_dict": lambda: held.update(full=copy.deepcopy(model.state_dict())),
        "load_state_dict": lambda: model.load_state_dict(held["full"]),
    }  # fmt: skip


def only(held: dict[str, Any]) -> dict[str, Any]:
    """What is saved beside a model."""
    return {"optimizer": held["optimizer"]}


def folder() -> str:
    """Where this round saves."""
    return f"{TARGET}/{ROUND}"


TARGET, ROUND = "", 0
DOORS = {"fsdpc": native, "torch": under_torch, "unsharded": plain}


def turn(door: str, params: int, units: int, peers: int, target: str) -> None:
    """The best milliseconds of every call, of several."""
    global TARGET, ROUND
    import fsdpc

    TARGET = target
    if peers:
        fsdpc.distributed.group._world = fsdpc._core.Comm(0, peers, None)
    else:
        fsdpc.init()
    shard, _, calls = DOORS[door](params, units)
    for name in ("save", "load") if peers else ():
        del calls[name]  # others write files too
    best = {"fully_shard": timed(shard)}
    best["first forward"] = timed(calls["forward"])
    calls["backward"]()
    for ROUND in range(5):
        for name, call in calls.items():
            ms = timed(call)
            best[name] = min(ms, best.get(name, math.inf)) if ROUND > 0 else math.inf
    common.leave_result({"calls": best})


def main() -> None:
    """Print a table for each door and axis; exit with 1 if an exponent is too large."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--only", choices=DOORS)
    p.add_argument("--axis", choices=AXES)
    p.add_argument("--turn", nargs=5, help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        turn(o.turn[0], *map(int, o.turn[1:4]), o.turn[4])
        return
    common.header()
    slopes: dict[tuple[str, str, str], float] = {}
    for door in (o.only,) if o.only else DOORS:
        for axis in (o.axis,) if o.axis else AXES:
            if door != "unsharded" or axis in ("parameters", "units"):
                found = measure(door, axis, AXES[axis], o.rounds)
                slopes |= {(door, axis, name): slope for name, slope in found.items()}
    steep = [
        f"{door} {name} over {axis}"
        for (door, axis, name), slope in slopes.items()
        if door != "unsharded" and slope > max(MOST, slopes.get(("unsharded", axis, name), 0))
    ]
    print(f"exponents of at most {MOST}: " + ("all" if not steep else f"not {', '.join(steep)}"))
    sys.exit(bool(steep))


def turns(axis: str, count: int) -> float:
    """How much of the time a rank computes, where ranks take turns."""
    return min(1.0, len(os.sched_getaffinity(0)) / count) if axis == "ranks" else 1.0


def measure(door: str, axis: str, counts: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Print one table; return the exponent of every call."""
    best: dict[int, dict[str, float]] = {count: {} for count in counts}
    for _ in range(rounds):
        for count in counts:
            alone = door == "unsharded" or axis == "peers"
            ranks = count if axis == "ranks" else 1 if alone else 2
            params = {"parameters": count, "units": 16 * count}.get(axis, 128)
            peers = count if axis == "peers" else 0
            units = count if axis == "units" else 8
            with tempfile.TemporaryDirectory() as target:
                arguments = ["--turn", door, str(params), str(units), str(peers), target]
                found = common.run_ranks(__file__, arguments, ranks)["calls"]
                for name, ms in found.items():
                    best[count][name] = min(ms, best[count].get(name, math.inf))
    rows, exponents = [], {}
    for name in best[counts[0]]:
        share = [math.log(best[count][name] * turns(axis, count)) for count in counts[-3:]]
        exponent = float(np.polyfit(np.log(counts[-3:]), share, 1)[0])
        rows.append([name, *(f"{best[count][name]:.3g}" for count in counts), f"{exponent:.2f}"])
        exponents[name] = exponent
    common.table([f"{door}, ms", *(f"{count} {axis}" for count in counts), "exponent"], rows)
    print()
    return exponents


if __name__ == "__main__":
    main()
