"""Optimizers beside torch's: rules, the whole update, and AdamW beside what memory gives.

``rules``: steps on one thread, and the whole update: clip, step, publish, reset. torch has no Lion:
its column there is SGD with momentum, fused, which moves the same bytes.

``memory``: an AdamW step beside a pass with the same reads and writes and next to no arithmetic
(c/stream_step.c), torch's fused AdamW and DeepSpeed's cpu_adam, where ``deepspeed`` and ``ninja``
are installed. They take turns in one process a number of threads and work on the same arrays: which
pages an array lies in can double the time of any of them, so the arrays are made anew a few times.
An element is 28 bytes: gradient read, parameter and two states read and written, all fp32. A bf16
wire is 2 more; fsdpc writes it in the same pass (and there the others have a parameter of their
own), torch and DeepSpeed by ``wire.copy_(parameter)``. GB/s counts these bytes alone. Ratios are
medians of the rounds' ratios.

python benchmarks/bench_optim.py [--parts rules memory] [--powers 20 22 24 26] [--rounds 7]
    [--memory-powers 23 26] [--threads 1 2] [--placements 3]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["FSDPC_THREADS"] = os.environ.get("BENCH_THREADS", "1")

import numpy as np
import torch

import fsdpc
from fsdpc import _core

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

STREAM = Path(__file__).resolve().parent / "c" / "stream_step.c"


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    t = time.perf_counter()
    run()
    return time.perf_counter() - t


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
        return {which: partial(timed, optimizer.step) for which, optimizer in optimizers.items()}

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


def rules_table(powers: list[int], rounds: int) -> None:
    """Each rule's step, and the whole update, on one thread."""
    torch.set_num_threads(1)
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
        for power in powers:
            runs = pair(2**power)
            common.alternate(runs, 2)  # first touches
            t = common.alternate(runs, rounds)
            ms = {k: [s * 1e3 for s in v] for k, v in t.items()}
            ratio = statistics.median(ms["torch"]) / statistics.median(ms["fsdpc"])
            rows.append([f"{what}, 2^{power} fp32", common.spread(ms["fsdpc"]),
                         common.spread(ms["torch"]), f"{ratio:.2f}"])  # fmt: skip
    common.table(["one thread", "fsdpc ms", "torch ms", "torch's time over ours"], rows)
    print()


# ---- beside what memory gives ----


def compile_stream() -> ctypes.CDLL:
    """The pass of stream_step.c, for this processor."""
    flags = ["-O3", "-march=native", "-fopenmp", "-std=c11", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "stream_step.so")
        subprocess.run([os.environ.get("CC", "cc"), *flags, STREAM, "-o", library], check=True)
        return ctypes.CDLL(library)


def aligned(n: int, dtype: Any) -> torch.Tensor:
    """Zeros at a multiple of 64 bytes, in huge pages where NumPy is given them."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(n + 64 // size, dtype)
    raw.fill(0)
    begin = -raw.ctypes.data % 64 // size
    return torch.from_numpy(raw[begin : begin + n])


class Arrays:
    """What all steps work on, as torch's tensors over fsdpc's memory, and fsdpc's step.

    With a parameter buffer fsdpc steps a unit that computes in bf16. A unit of which a master was
    lent is compared with its parameter buffer at each step, so there the others have a parameter of
    their own.
    """

    def __init__(self, n: int, wire: bool) -> None:
        if wire:
            dtypes = {"param_dtype": fsdpc.bfloat16, "reduce_dtype": fsdpc.float32}
            model = fsdpc.fully_shard(Rows(n), mp_policy=fsdpc.MixedPrecisionPolicy(**dtypes))
            model().backward()
            p = model.weight
        else:
            p = fsdpc.nn.Parameter(_core.randn(n, seed=1))
            p.grad = _core.randn(n, seed=2)
        optimizer = fsdpc.optim.AdamW([p], lr=1e-3)
        lent = [p.grad, *optimizer.state_views(p).values()]
        self.step = optimizer.step
        self.param_buffer = aligned(n, np.int16).view(torch.bfloat16) if wire else None
        self.param = aligned(n, np.float32) if wire else torch.from_dlpack(p.detach())
        self.grad, self.exp_avg, self.exp_avg_sq = (torch.from_dlpack(t).view(n) for t in lent)

    def stream(self, library: ctypes.CDLL, ahead: int) -> None:
        """One pass of stream_step.c."""
        arrays = (self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.param_buffer)
        at = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in arrays]
        library.stream_step(*at, ctypes.c_size_t(self.param.numel()), ahead)

    def torch_step(self, make: Callable[[Any], Any], step: object) -> Callable[[], None]:
        """A step of an optimizer of torch's kind; the copy-in is a second pass."""
        p = torch.nn.Parameter(self.param)
        p.grad = self.grad
        optimizer = make([p])
        optimizer.state[p] = {"step": step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

        def run() -> None:
            optimizer.step()
            if self.param_buffer is not None:
                self.param_buffer.copy_(p.detach())

        return run


def deepspeed_adam() -> Callable[[Any], Any] | str:
    """DeepSpeed's AdamW on CPUs, or why it does not take part."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(8))])  # compiles it, by ninja
    except Exception as failed:  # not installed, or its compiler failed
        return f"{type(failed).__name__}: {failed}"
    return partial(DeepSpeedCPUAdam, lr=1e-3, weight_decay=0.01, adamw_mode=True)


def memory_turn(powers: list[int], rounds: int, placements: int) -> dict[str, Any]:
    """Rows of all passes on this process's threads, and why DeepSpeed takes no part."""
    threads = fsdpc.num_threads()
    assert threads == torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    rows: list[list[object]] = []
    library, adam = compile_stream(), deepspeed_adam()
    fused = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    for power, wire in [(power, wire) for power in powers for wire in (False, True)]:
        ms: dict[str, list[float]] = {}
        for _ in range(placements):
            arrays = Arrays(2**power, wire)
            passes = {
                "stream": partial(arrays.stream, library, 0),
                "stream, prefetching": partial(arrays.stream, library, 1),
                "fsdpc": arrays.step,
                "torch, fused": arrays.torch_step(fused, torch.tensor(0.0)),
            }
            if callable(adam):
                passes["DeepSpeed cpu_adam"] = arrays.torch_step(adam, 0)
            runs = {name: partial(timed, run) for name, run in passes.items()}
            common.alternate(runs, 1)  # first touches
            for name, values in common.alternate(runs, rounds).items():
                ms.setdefault(name, []).extend(s * 1e3 for s in values)
        best = min((ms["stream"], ms["stream, prefetching"]), key=statistics.median)
        for name, values in ms.items():
            rate = 2**power / statistics.median(values) / 1e6
            share = statistics.median(b / v for b, v in zip(best, values))
            ratio = statistics.median(v / f for v, f in zip(values, ms["fsdpc"]))
            rows.append([threads, f"2^{power}", "bf16" if wire else "none", name,
                         common.spread(values), f"{rate:.3f}", f"{rate * (30 if wire else 28):.1f}",
                         f"{share:.2f}", f"{ratio:.2f}"])  # fmt: skip
    return {"rows": rows, "missing": "" if callable(adam) else adam}


def memory_table(o: argparse.Namespace) -> None:
    """The turns of each number of threads, each in a process of its own: OpenMP's is fixed."""
    rows, missing = [], ""
    for n in o.threads:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            env = {**os.environ, "BENCH_THREADS": str(n), "BENCH_RESULT": str(result),
                   "OMP_WAIT_POLICY": "passive"}  # fmt: skip  # no thread spins on another's core
            words = [sys.executable, __file__, "--turn", "--rounds", str(o.rounds),
                     "--placements", str(o.placements), "--memory-powers",
                     *map(str, o.memory_powers)]  # fmt: skip
            subprocess.run(words, env=env, check=True)
            turn = json.loads(result.read_text())
        rows, missing = rows + turn["rows"], turn["missing"]
    common.table(["threads", "elements", "unsharded", "pass", "ms", "Gelement/s", "GB/s",
                  "share of the stream", "its time over fsdpc's"], rows)  # fmt: skip
    if missing:
        print(f"\nDeepSpeed's cpu_adam takes no part: {missing}.")


def main() -> None:
    """Print the tables."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    p.add_argument("--parts", nargs="+", choices=["rules", "memory"], default=["rules", "memory"])
    p.add_argument("--powers", nargs="+", type=int, default=[20, 22, 24, 26])
    p.add_argument("--memory-powers", nargs="+", type=int, default=[23, 26])
    p.add_argument("--threads", nargs="+", type=int, default=sorted({1, cores}))
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--placements", type=int, default=3)
    p.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        with redirect_stdout(sys.stderr):  # where DeepSpeed's log belongs
            common.leave_result(memory_turn(o.memory_powers, o.rounds, o.placements))
        return
    common.header()
    if "rules" in o.parts:
        rules_table(o.powers, o.rounds)
    if "memory" in o.parts:
        memory_table(o)


if __name__ == "__main__":
    main()
