"""Steps of AdamW, Muon and Adafactor, next to torch's.

    python benchmarks/bench_optimizers.py [--presets 10M 41M] [--rounds 2] [--quick]

A step is only the optimizer's, over the fp32 parameters of a LLaMA, whose gradients come from one
backward. It is timed from a barrier until all ranks have finished. Engines take turns; each turn is
a fresh set of processes whose median counts.

"fsdpc" is ``fsdpc.optim`` on ranks of one thread. "torch" is ``torch.optim`` on the unsharded model
of the same shapes, in one process with as many threads as fsdpc has ranks; its AdamW is fused. On 2
ranks a 10M model under ``fsdpc.torch`` is also stepped, by "fsdpc.torch" and by "torch over
DTensors". Muon takes the matrices in blocks, and AdamW takes the other parameters.

torch's Muon iterates in bf16, fsdpc's in fp32; "in fp32" is torch's with its iterations in fp32.
On a processor without bf16 products torch's own step of 10M takes half a minute. It then runs once,
in the first round and without warming up, and 41M has no such row.

GFLOP/s counts only the products of Muon's iterations. "of products" divides this by the rate of
the same products outside of a step, in fp32, measured on each rank as in bench_gemm.py.

--quick takes one step of 10M in one round, and leaves out iterations in bf16.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

PRESETS = ("10M", "41M")
SMALL = PRESETS[0]  # the model under fsdpc.torch
STEPS = {"AdamW": 15, "Muon": 2, "Adafactor": 7}  # timed ones of a turn
ITERATIONS = 5  # of Muon, by default
MUON_LR, LR = 0.02, 1e-3

Steps = dict[str, Callable[[], object]]


def measure(
    steps: Steps, barrier: Callable[[], object], quick: bool, slow: str = ""
) -> dict[str, list[float]]:
    """Milliseconds of steps, after an untimed one; the step named `slow` runs only once."""
    found: dict[str, list[float]] = {}
    for name, step in steps.items():
        if name != slow:
            step()
        found[name] = []
        for _ in range(1 if quick or name == slow else STEPS[name.rpartition(" ")[2]]):
            barrier()
            begin = time.perf_counter()
            step()
            barrier()
            found[name].append((time.perf_counter() - begin) * 1e3)
    return found


# ---- Muon's products ----


def iterated(preset: str) -> list[tuple[int, int]]:
    """Sides of the matrices that Muon takes, the shorter one first."""
    import fsdpc
    from fsdpc import models

    with fsdpc.deferred_init():
        model = models.Llama(models.preset(preset))
    found = [sorted(p.shape) for _, p in fsdpc.optim.muon_groups(model)[0]["params"]]
    return [(short, long) for short, long in found]


def flops(preset: str) -> float:
    """Operations of all iterations of a step: X X', G G and p(G) X of each matrix X."""
    return ITERATIONS * sum(2.0 * r * r * (2 * c + r) for r, c in iterated(preset))


def product_seconds(preset: str) -> float:
    """Seconds that the products of all iterations take one thread, one after the other."""
    from bench_gemm import seconds

    from fsdpc import _core

    shapes, total = iterated(preset), 0.0
    for r, c in set(shapes):
        x, g = _core.randn(r, c, seed=1), _core.randn(r, r, seed=2)
        calls = [partial(_core.linear, x, x), *(partial(_core.matmul, g, y) for y in (g, x))]
        total += shapes.count((r, c)) * sum(map(seconds, calls))
    return ITERATIONS * total


def iterate_in_fp32(grad: Any, coefficients: Any, count: int, eps: float) -> Any:
    """Do what torch.optim.Muon does to a matrix, in fp32."""
    import torch

    a, b, c = coefficients
    is_tall = grad.size(0) > grad.size(1)
    x = grad.T if is_tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(count):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


# ---- turns ----


def native_turn(preset: str, quick: bool) -> dict[str, Any]:
    """Steps of fsdpc's own models on this rank; each optimizer has one."""
    import bench_llama

    import fsdpc
    from fsdpc import models, optim

    makers: dict[str, Callable[[Any], Any]] = {
        "AdamW": lambda model: optim.AdamW(model.parameters(), lr=LR),
        "Muon": lambda model: optim.Muon(optim.muon_groups(model, lr=LR), lr=MUON_LR),
        "Adafactor": lambda model: optim.Adafactor(model.parameters()),
    }
    fsdpc.init()
    steps: Steps = {}
    for name, make in makers.items():
        fsdpc.manual_seed(0)
        with fsdpc.deferred_init():
            model = models.Llama(models.preset(preset))
        for block in model.blocks():
            fsdpc.fully_shard(block)
        fsdpc.fully_shard(model)
        steps[f"fsdpc {name}"] = make(model).step
        model(*bench_llama.batch(preset, models.preset(preset).vocab_size)).backward()
    found = measure(steps, fsdpc.barrier, quick)
    return {"ms": found, "products_s": product_seconds(preset)}


def torch_turn(preset: str, sharded: bool, number: int, quick: bool) -> dict[str, Any]:
    """Steps on transformers' model of the preset's shape."""
    import bench_torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model, units, loss, dtype = bench_torch.workload(f"llama-{preset}-fp32")
    if sharded:
        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ['BENCH_STORE']}",
            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
        )  # fmt: skip
        bench_torch.shard("fsdpc", "", model, units, dtype)
    inside = {id(p) for unit in units for p in unit.parameters() if p.dim() == 2}
    matrices = [p for p in model.parameters() if id(p) in inside]
    others = [p for p in model.parameters() if id(p) not in inside]
    loss(model).backward()
    theirs = torch.optim.Muon(matrices, lr=MUON_LR)
    rest = torch.optim.AdamW(others, lr=LR, fused=True)
    own = torch.optim._muon._zeropower_via_newtonschulz

    def muon(iterate: Any) -> None:
        torch.optim._muon._zeropower_via_newtonschulz = iterate
        theirs.step()
        rest.step()

    engine = "torch over DTensors" if sharded else "torch"
    steps: Steps = {f"{engine}, in fp32 Muon": partial(muon, iterate_in_fp32)}
    is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not quick and (is_fast or (preset == SMALL and number == 0)):
        steps[f"{engine} Muon"] = partial(muon, own)
    if sharded:
        from fsdpc.torch import optim

        groups = [{"params": matrices}, {"params": others, "use_muon": False, "lr": LR}]
        steps["fsdpc.torch Muon"] = optim.Muon(groups, lr=MUON_LR).step
    else:
        parameters = list(model.parameters())
        steps["torch AdamW"] = torch.optim.AdamW(parameters, lr=LR, fused=True).step
        steps["torch Adafactor"] = torch.optim.Adafactor(parameters).step
    barrier = dist.barrier if sharded else lambda: None
    return {"ms": measure(steps, barrier, quick, "" if is_fast else f"{engine} Muon")}


def main() -> None:
    """Run all turns and print the rows."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--quick", action="store_true", help="10M, one round, one step")
    p.add_argument("--turn", nargs=3, metavar=("ENGINE", "PRESET", "ROUND"), help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        engine, preset, number = o.turn
        common.leave_result(
            native_turn(preset, o.quick) if engine == "fsdpc" else
            torch_turn(preset, engine == "sharded", int(number), o.quick)
        )  # fmt: skip
        return
    common.header()
    common.table(["model", "ranks", "engine", "optimizer", "ms a step (range)", "over fsdpc's",
                  "GFLOP/s", "of products"], [])  # fmt: skip
    for preset in (SMALL,) if o.quick else o.presets:
        for ranks in (1, 2):
            rows_of(preset, ranks, 1 if o.quick else o.rounds, ["--quick"] * o.quick)


def rows_of(preset: str, ranks: int, rounds: int, options: list[str]) -> None:
    """Print the rows of a model on a number of ranks."""
    ms: dict[str, list[float]] = {}
    products = []
    engines = {"fsdpc": (ranks, 1), "torch": (1, ranks)}
    if ranks > 1 and preset == SMALL:
        engines["sharded"] = (ranks, 1)
    for number in range(rounds):
        for engine, (processes, threads) in engines.items():
            arguments = ["--turn", engine, preset, str(number), *options]
            found = common.run_ranks(__file__, arguments, processes, threads=threads)
            for name, values in found["ms"].items():
                ms.setdefault(name, []).append(statistics.median(values))
            products += [found["products_s"]] if engine == "fsdpc" else []
    work = flops(preset)
    plain = ranks * work / statistics.median(products)
    for name, values in ((n, v) for optimizer in STEPS for n, v in ms.items()
                         if n.endswith(f" {optimizer}")):  # fmt: skip
        engine, _, optimizer = name.rpartition(" ")
        median = statistics.median(values)
        ours = statistics.median(ms[f"fsdpc {optimizer}"])
        cells = [preset, ranks, engine, optimizer, common.spread(values), f"{median / ours:.2f}"]
        if optimizer == "Muon":
            rate = work / median * 1e3
            cells += [f"{rate / 1e9:.0f}", f"{rate / plain:.2f}" if "fsdpc" in engine else ""]
        common.row([*cells, "", ""][:8])


if __name__ == "__main__":
    main()
