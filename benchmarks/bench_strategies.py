"""Every strategy on one LLaMA, beside torch FSDP2 and DDP, DeepSpeed ZeRO and JAX.

    python benchmarks/bench_strategies.py [--presets 10M 41M] [--dtypes fp32 bf16] [--rounds 5]

The step, the ranks and the turns are those of bench_llama.py. "Over local" is what a step takes
beyond torch's without any communication; fsdpc also says how long its ranks waited for each other.
DeepSpeed and JAX take part where they are installed (``pip install deepspeed jax``). JAX runs one
process with two devices, parameters and states sharded over them, one thread pool of both cores.
"""

from __future__ import annotations

import os
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_llama
import common
from bench_llama import BATCHES, batch, measure

OURS = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD", "deterministic")
TORCH = ("fsdp2", "ddp", "local")
ZERO = ("zero1", "zero2", "zero3")


def run_ours(name: str, preset: str, dtype: str) -> dict[str, Any]:
    """One turn of a strategy on this rank."""
    import fsdpc
    from fsdpc import distributed
    from fsdpc.sharding import strategies

    fsdpc.init(deterministic=name == "deterministic")
    strategy = "FULL_SHARD" if name == "deterministic" else name
    comms = [distributed.world()]
    begins: list[int] = []
    waited: list[int] = []

    def total() -> int:
        return sum(c.waited_ns for c in comms)

    train = bench_llama.fsdpc_step(
        preset, dtype, begun=lambda: begins.append(total()), strategy=strategy
    )
    if strategy == "NO_SHARD":
        comms.append(strategies.replicated_mesh().comm("replicate"))

    def step() -> None:
        train()
        waited.append(total() - begins[-1])

    seconds = measure(step)
    return {"seconds": seconds, "waited_ms": statistics.median(waited[-len(seconds) :]) / 1e6}


def run_deepspeed(stage: int, preset: str, dtype: str) -> dict[str, Any]:
    """One turn of ZeRO on this rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    import deepspeed
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, vocab = bench_llama.torch_llama(preset)
    config = {
        "train_micro_batch_size_per_gpu": BATCHES[preset][0],
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bf16"},
        "wall_clock_breakdown": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids, labels = (torch.from_numpy(a) for a in batch(preset, vocab))

    def step() -> None:
        torch.distributed.barrier()
        logits = engine(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        engine.backward(loss)
        engine.step()

    return {"seconds": measure(step)}


def engines_here() -> tuple[str, ...]:
    """Those that can run on this machine."""
    found = OURS + TORCH
    if find_spec("deepspeed"):
        found += ZERO
    return found + (("jax",) if find_spec("jax") else ())


def turn(engine: str, preset: str, dtype: str) -> None:
    """Run one turn on this rank and leave its result."""
    if engine in OURS:
        result = run_ours(engine, preset, dtype)
    elif engine in ZERO:
        result = run_deepspeed(int(engine[-1]), preset, dtype)
    elif engine == "jax":
        import jax_llama

        result = jax_llama.run(preset, dtype)
    else:
        result = bench_llama.run_torch(engine, preset, dtype)
    common.leave_result(result)


def main() -> None:
    """Run all turns and print the rows."""
    o = bench_llama.parse(__doc__, engines_here())
    if o.turn:
        turn(*o.turn)
        return
    common.header()
    rows = []
    for preset, dtype, turns in bench_llama.take_turns(__file__, o):
        tokens = 2 * BATCHES[preset][0] * BATCHES[preset][1]
        ms = {e: [statistics.median(t["seconds"]) * 1e3 for t in ts] for e, ts in turns.items()}
        local = statistics.median(ms.get("local", [float("nan")]))
        for e in o.engines:
            median = statistics.median(ms[e])
            waited = [t["waited_ms"] for t in turns[e] if "waited_ms" in t]
            rows.append([
                f"Llama {preset} {dtype}", e, common.spread(ms[e]),
                f"{tokens / median * 1e3:,.0f}", f"{median - local:.0f}",
                f"{statistics.median(waited):.1f}" if waited else "",
                f"{statistics.median(t['peak_pss_bytes'] for t in turns[e]) / 2**20:,.0f}",
            ])  # fmt: skip
    common.table(
        ["model", "engine", "ms a step (range)", "tokens/s", "over local ms", "waited ms",
         "peak PSS MiB"], rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
