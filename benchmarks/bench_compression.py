"""Losses of a LLaMA whose messages between hosts are compressed.

The native frontend trains on the bytes of the repository's documentation, on two ranks of two
pretended hosts, from several starts with each compression. "outer=10" makes replicas meet in every
tenth step. The spread of the exact runs over starts says which differences mean something.

python benchmarks/bench_compression.py [--preset 2M] [--steps 1000] [--starts 3]
                                       [--exact-starts 5] [--only exact gather=int8 ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import fsdpc
from fsdpc.distributed import pretend

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

SEQ, BATCH, LR, EVERY = 128, 4, 1e-3, 50
FORMS = ("exact", "gather=bf16,reduce=bf16", "gather=int8", "reduce=int8",
         "gather=int8,reduce=int8", "gather=fp8,reduce=fp8", "gather=int4",
         "reduce=int4", "reduce=int8,error_feedback=yes", "reduce=int4,error_feedback=yes",
         "replicas=powersgd8:start_step=50", "outer=10")  # fmt: skip


def train(form: str, preset: str, steps: int, start: int) -> list[float]:
    """Mean losses of each EVERY steps, over both ranks."""
    fsdpc.manual_seed(start)
    model = fsdpc.models.Llama(fsdpc.models.preset(preset))
    options: dict[str, Any] = {}
    every = int(form.partition("outer=")[2] or 0)
    if every or "replicas=" in form:
        options["strategy"] = "NO_SHARD"
    if form != "exact" and not every:
        options["compression"] = fsdpc.Compression.parse(form)
    for block in model.blocks():
        fsdpc.fully_shard(block, **options)
    fsdpc.fully_shard(model, **options)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=LR)
    outer = fsdpc.Outer(model, every=every) if every else None
    pages = sorted((common.ROOT / "docs").glob("*.md"))
    data = np.frombuffer(b"".join(page.read_bytes() for page in pages), np.uint8).astype(np.int64)
    rng = np.random.default_rng([start, fsdpc.rank()])
    seen = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 50)
        at = rng.integers(0, len(data) - SEQ, (BATCH, 1)) + np.arange(SEQ)
        loss = model(data[at], data[at + 1])
        loss.backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if outer:
            outer.step()
        seen.append(loss.item())
    means = fsdpc.all_gather(np.array([seen])).reshape(-1, steps // EVERY, EVERY).mean((0, 2))
    return [float(mean) for mean in means]


def main() -> None:
    """Print a row for each compression."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--preset", default="2M")
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--starts", type=int, default=3)
    p.add_argument("--exact-starts", type=int, help="of the first form, for the spread")
    p.add_argument("--only", nargs="+", default=FORMS, metavar="FORM")
    p.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)  # a form and a start, of a process
    o = p.parse_args()
    if o.turn:
        pretend.on_hosts(2)
        fsdpc.init()
        found = train(o.turn[0], o.preset, o.steps, int(o.turn[1]))
        common.leave_result({"losses": found})
        fsdpc.shutdown()
        return
    common.header()
    rows, exact = [], list[float]()
    for form in o.only:
        curves = []
        for start in range(o.starts if exact else max(o.starts, o.exact_starts or 0)):
            words = ["--turn", form, str(start), "--preset", o.preset, "--steps", str(o.steps)]
            turn = common.run_ranks(__file__, words, 2, timeout=3600, sample=False)
            curves.append(turn["losses"])
        last = [curve[-1] for curve in curves]
        exact = exact or last
        over = [100 * (a / b - 1) for a, b in zip(last, exact, strict=False)]
        middle = statistics.fmean(curve[len(curve) // 2] for curve in curves)
        rows.append([form, f"{middle:.4f}",
                     f"{statistics.fmean(last):.4f} ({min(last):.4f}..{max(last):.4f})",
                     f"{statistics.fmean(over):+.2f} %",
                     f"{min(over):+.2f}..{max(over):+.2f}"])  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    common.table([f"{o.preset}, mean loss of {EVERY} steps", "middle", f"up to step {o.steps}",
                  "over exact", "by start"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
