"""The loss of a language model's head: time and memory of forward and backward.

Each way runs in a process of its own, on all threads, over tokens x classes x hidden. Memory is how
far the process grew over the operands, so it includes both gradients.

``two steps`` computes all logits. Peers are torch in two steps, and its chunked
``linear_cross_entropy`` (torch 2.13 and newer).

python benchmarks/bench_head.py [--shapes 2048,32000,256 ...] [--dtype float32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as TF

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

import fsdpc.torch
from fsdpc import functional as F

SHAPES = ["2048,32000,256", "2048,50257,768", "8192,50257,768", "1024,128256,2048"]


def torch_ways(x: Any, w: Any, t: Any) -> dict[str, Callable[[], Any]]:
    """The ways over torch's tensors."""
    found = {
        "torch, two steps": lambda: TF.cross_entropy(TF.linear(x, w).float(), t),
        "fsdpc.torch": lambda: fsdpc.torch.linear_cross_entropy(x, w, t),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        found["torch, chunked"] = lambda: TF.linear_cross_entropy(x, w, t, options=options)
    return found


def ways(shape: tuple[int, int, int], dtype: str) -> dict[str, Callable[[], Any]]:
    """All ways, over one set of operands."""
    tokens, classes, hidden = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden).to(getattr(torch, dtype))
    w = (torch.randn(classes, hidden) * hidden**-0.5).to(x.dtype)
    t = torch.randint(0, classes, (tokens,))
    found = torch_ways(x.requires_grad_(), w.requires_grad_(), t)
    ours = [fsdpc.from_dlpack(each.detach()) for each in (x, w)]
    ids = fsdpc.from_dlpack(t)
    for each in ours:
        each.requires_grad = True
    found["fsdpc, two steps"] = lambda: F.cross_entropy(F.linear(*ours), ids)
    found["fsdpc"] = lambda: F.linear_cross_entropy(*ours, ids)

    def step(way: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for each in (x, w, *ours):
                each.grad = None
            way().backward()

        return run

    return {name: step(way) for name, way in found.items()}


def memory(field: str) -> int:
    """The memory that this process has (VmRSS), or has had at most (VmHWM), in KiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def measure(name: str, shape: tuple[int, int, int], dtype: str, rounds: int) -> None:
    """Print the median of a way's times in seconds, and its memory in KiB."""
    small = ways((64, 64, 8), dtype)  # threads and buffers that any way would need
    for way in small.values():
        way()
    run, before = ways(shape, dtype)[name], memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    run()
    grown, times = memory("VmHWM") - before, []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    print(json.dumps([sorted(times)[rounds // 2], grown]))


def main() -> None:
    """Print a row for each shape and way."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--shapes", nargs="+", default=SHAPES, metavar="TOKENS,CLASSES,HIDDEN")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--way", help=argparse.SUPPRESS)  # of a process
    o = p.parse_args()
    shapes = [tuple(int(n) for n in text.split(",")) for text in o.shapes]
    if o.way:
        measure(o.way, shapes[0], o.dtype, o.rounds)
        return
    common.header()
    rows = []
    for text, shape in zip(o.shapes, shapes, strict=True):
        names = ["torch, two steps", "torch, chunked", "fsdpc, two steps", "fsdpc",
                 "fsdpc.torch"]  # fmt: skip
        two, gradients = 0.0, (shape[0] + shape[1]) * shape[2] * 4 / 2**20
        known = ways((1, 1, 1), o.dtype)
        for name in filter(known.__contains__, names):
            done = subprocess.run(
                [sys.executable, __file__, "--way", name, "--shapes", text, "--dtype", o.dtype,
                 "--rounds", str(o.rounds)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            seconds, grown = json.loads(done.stdout.splitlines()[-1])
            two = seconds if name == "fsdpc, two steps" else two
            rows.append([" x ".join(text.split(",")), name, f"{seconds * 1e3:.0f}",
                         f"{grown / 1024:.0f}", f"{grown / 1024 - gradients:.0f}"])  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    common.table(["tokens x classes x hidden", f"head in {o.dtype}", "ms", "MiB",
                  "MiB beyond fp32 gradients"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
