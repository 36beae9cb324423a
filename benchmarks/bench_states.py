"""Formats of optimizer states: the loss that a model reaches with them, and the time of a step.

``loss``: AdamW trains a LLaMA of 10M parameters under torch, from the same starts on the bytes of
the repository's documentation, with each format of states, in one process and on one rank. Peers
are torch's own AdamW, and the AdamW8bit of torchao and bitsandbytes where these are installed.

``step``: one step over a matrix, in fsdpc and the peers, on all threads.

python benchmarks/bench_states.py [--parts loss step] [--steps 500] [--starts 1]
    [--only NAME ...] [--powers 22 24] [--rounds 9]
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

os.environ["OMP_NUM_THREADS"] = os.environ["FSDPC_THREADS"] = os.environ.get("BENCH_THREADS", "1")

import numpy as np
import torch

import fsdpc
import fsdpc.torch
from fsdpc import _core, nn, optim

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

SEQ, BATCH, LR, EVERY = 128, 2, 1e-3, 50


def peers() -> dict[str, Callable[..., Any]]:
    """8-bit AdamWs of other packages by name; says which take no part."""
    found: dict[str, Callable[..., Any]] = {}
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

        found["torchao AdamW8bit"] = AdamW8bit
    except ImportError as missing:
        print(f"torchao takes no part: {missing}", file=sys.stderr)
    try:
        import bitsandbytes  # type: ignore[import-not-found]

        found["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    except ImportError as missing:
        print(f"bitsandbytes takes no part: {missing}", file=sys.stderr)
    return found


# ---- loss ----


def text() -> torch.Tensor:
    """The documentation's bytes."""
    pages = sorted((common.ROOT / "docs").glob("*.md"))
    return torch.tensor(list(b"".join(page.read_bytes() for page in pages)))


def llama(start: int) -> torch.nn.Module:
    """A model of 10M parameters over bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(start)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=9,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=SEQ,
        attn_implementation="sdpa"))  # fmt: skip


def losses(make: Callable[[Any], Any], shard: bool, steps: int, start: int) -> list[float]:
    """Mean losses of each EVERY steps."""
    model, data, seen = llama(start), text(), []
    if shard:
        fsdpc.torch.fully_shard(model)
    optimizer = make(model.parameters())
    chance = torch.Generator().manual_seed(start + 1)
    for _ in range(steps):
        at = torch.randint(len(data) - SEQ, (BATCH, 1), generator=chance)
        tokens = data[at + torch.arange(SEQ)]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
        if len(seen) % 100 == 0:
            print(f"step {len(seen)}: {statistics.fmean(seen[-EVERY:]):.4f}", file=sys.stderr)
    return [statistics.fmean(seen[i : i + EVERY]) for i in range(0, steps, EVERY)]


def loss_table(steps: int, starts: int, only: list[str]) -> None:
    """Losses at the end, over those of fp32 states; means and ranges over starts."""
    ours = fsdpc.torch.optim.AdamW
    runs: dict[str, tuple[Callable[[Any], Any], bool]] = {
        "fsdpc, fp32": (partial(ours, lr=LR), True),
        "fsdpc, bf16": (partial(ours, lr=LR, state_dtype="bfloat16"), True),
        "fsdpc, int8": (partial(ours, lr=LR, state_dtype="int8"), True),
        "torch AdamW": (partial(torch.optim.AdamW, lr=LR), False),
    }
    runs |= {name: (partial(make, lr=LR), False) for name, make in peers().items()}
    rows, whole = [], [0.0] * starts
    for name, (make, shard) in runs.items():
        if only and name not in only:
            continue
        try:
            found = [losses(make, shard, steps, start) for start in range(starts)]
        except Exception as failed:
            print(f"{name} takes no part: {type(failed).__name__}: {failed}", file=sys.stderr)
            continue
        last = [each[-1] for each in found]
        whole = whole if any(whole) else last
        over = [100 * (end / fp32 - 1) for end, fp32 in zip(last, whole, strict=True)]
        middle = statistics.fmean(each[len(each) // 2] for each in found)
        spread = f" ({min(over):+.2f}..{max(over):+.2f})" if starts > 1 else ""
        rows.append([name, f"{statistics.fmean(each[0] for each in found):.4f}", f"{middle:.4f}",
                     f"{statistics.fmean(last):.4f}",
                     f"{statistics.fmean(over):+.2f} %{spread}"])  # fmt: skip
        print(name, rows[-1], file=sys.stderr, flush=True)
    common.table([f"mean loss of {EVERY} steps", "first", "middle", f"up to step {steps}",
                  "over fp32 states"], rows)  # fmt: skip


# ---- step ----


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    t = time.perf_counter()
    run()
    return time.perf_counter() - t


def steps_of(n: int) -> dict[str, Callable[[], float]]:
    """A step of each kind over a matrix of rows of 1024."""
    g = np.random.default_rng(0).standard_normal((n // 1024, 1024)).astype(np.float32)
    found: dict[str, Callable[[], float]] = {}
    for dtype in ("float32", "bfloat16", "int8"):
        p = nn.Parameter(g.copy())
        p.grad = _core.tensor(g)
        own = optim.AdamW([p], lr=1e-3, state_dtype=dtype)
        found[f"fsdpc, {dtype}"] = partial(timed, own.step)
    made = {"torch AdamW, fused": partial(torch.optim.AdamW, fused=True), **peers()}
    for name, make in made.items():
        q = torch.nn.Parameter(torch.from_numpy(g.copy()))
        q.grad = torch.from_numpy(g.copy())
        try:
            other = make([q], lr=1e-3)
            other.step()
        except Exception as failed:
            print(f"{name} takes no part: {type(failed).__name__}: {failed}", file=sys.stderr)
            continue
        found[name] = partial(timed, other.step)
    return found


def step_table(powers: list[int], rounds: int) -> None:
    """Times of all kinds, which take turns."""
    rows = []
    for power in powers:
        runs = steps_of(2**power)
        common.alternate(runs, 2)
        ms = {k: [s * 1e3 for s in v] for k, v in common.alternate(runs, rounds).items()}
        whole = statistics.median(ms["fsdpc, float32"])
        rows += [[f"2^{power}", name, common.spread(values),
                  f"{statistics.median(values) / whole:.2f}"] for name, values in ms.items()]
    common.table(["elements", "AdamW", "ms", "over fsdpc's fp32 states"], rows)


def main() -> None:
    """Print the tables."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--parts", nargs="+", choices=["loss", "step"], default=["loss", "step"])
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--starts", type=int, default=1, help="seeds of models and batches")
    p.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows of the loss table")
    p.add_argument("--powers", nargs="+", type=int, default=[22, 24])
    p.add_argument("--rounds", type=int, default=9)
    o = p.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    common.header()
    if "loss" in o.parts:
        loss_table(o.steps, o.starts, o.only)
    if "step" in o.parts:
        step_table(o.powers, o.rounds)


if __name__ == "__main__":
    main()
