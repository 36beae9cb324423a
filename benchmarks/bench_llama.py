"""Tokens a second and peak memory of a LLaMA step: fsdpc against torch FSDP2, DDP and no
communication.

    python benchmarks/bench_llama.py [--presets 10M 41M] [--dtypes fp32 bf16] [--rounds 5]

A step is forward, backward, clipping at 1.0 and AdamW, 2 ranks with one thread each. Engines take
turns; each turn is a fresh set of processes whose median step counts. The torch model is
transformers' LlamaForCausalLM with the same shape. bf16 is autocast for torch without FSDP2 (as
its users run it), param bf16 and reduce fp32 for FSDP2 and for fsdpc.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

BATCHES = {"2M": (2, 256), "10M": (2, 256), "41M": (1, 256)}
ENGINES = ("fsdpc", "fsdp2", "ddp", "local")
WARM, STEPS = 3, 8


def batch(preset: str, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """The same random words for every engine."""
    rows, seq = BATCHES[preset]
    rng = np.random.default_rng(int(os.environ["RANK"]))
    ids = rng.integers(0, vocab, (rows, seq + 1), dtype=np.int64)
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def measure(step: Any) -> list[float]:
    """Seconds of each step after the warm ones."""
    times = []
    for i in range(WARM + STEPS):
        begin = time.perf_counter()
        step()
        if i >= WARM:
            times.append(time.perf_counter() - begin)
    return times


def fsdpc_step(
    preset: str, dtype: str, reduce: str = "fp32", begun: Any = lambda: None, every: int = 0,
    **options: Any,
) -> Callable[[], None]:
    """A step of our LLaMA, sharded with these options; begun() is called after its barrier.

    Replicas step alone for rounds of `every` steps, unless that is 0.
    """
    import fsdpc
    from fsdpc import models

    config = models.preset(preset)
    fsdpc.manual_seed(0)
    with fsdpc.deferred_init():
        model = models.Llama(config)
    policy = fsdpc.MixedPrecisionPolicy(
        param_dtype=fsdpc.bfloat16 if dtype == "bf16" else None,
        reduce_dtype=fsdpc.bfloat16 if reduce == "bf16" else fsdpc.float32,
    )
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=policy, **options)
    fsdpc.fully_shard(model, mp_policy=policy, **options)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=3e-4)
    outer = fsdpc.Outer(model, every=every) if every else None
    x, y = batch(preset, config.vocab_size)

    def step() -> None:
        optimizer.zero_grad()
        fsdpc.barrier()
        begun()
        model(x, y).backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if outer:
            outer.step()

    return step


def run_fsdpc(preset: str, dtype: str) -> dict[str, Any]:
    """One turn of fsdpc on this rank."""
    import fsdpc

    fsdpc.init()
    return {"seconds": measure(fsdpc_step(preset, dtype))}


def torch_llama(preset: str) -> tuple[Any, int]:
    """transformers' model of a preset, and its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fsdpc.models.config import preset as config_of

    c = config_of(preset)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.inner,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        max_position_embeddings=c.max_seq, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied,
        use_cache=False,
    ))  # fmt: skip
    return model, c.vocab_size


def run_torch(engine: str, preset: str, dtype: str) -> dict[str, Any]:
    """One turn of torch on this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['BENCH_STORE']}",
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    model, vocab = torch_llama(preset)
    if engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        kind = torch.bfloat16 if dtype == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    elif engine == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    ids, labels = (torch.from_numpy(a) for a in batch(preset, vocab))
    autocast = dtype == "bf16" and engine != "fsdp2"

    def step() -> None:
        optimizer.zero_grad()
        dist.barrier()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"seconds": measure(step)}


def parse(description: str | None, engines: Sequence[str]) -> argparse.Namespace:
    """Return the options of a comparison of engines."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--presets", nargs="+", default=["10M", "41M"], choices=list(BATCHES))
    p.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    p.add_argument("--engines", nargs="+", default=list(engines), choices=engines)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--turn", nargs=3, metavar=("ENGINE", "PRESET", "DTYPE"), help=argparse.SUPPRESS)
    return p.parse_args()


Turns = dict[str, list[dict[str, Any]]]


def take_turns(script: str, o: argparse.Namespace) -> Iterator[tuple[str, str, Turns]]:
    """Yield (preset, dtype, results by engine); engines take turns, round after round."""
    for preset in o.presets:
        for dtype in o.dtypes:
            turns: Turns = {e: [] for e in o.engines}
            for _ in range(o.rounds):
                for engine in o.engines:
                    ranks, threads = (1, 2) if engine == "jax" else (2, 1)
                    turns[engine].append(
                        common.run_ranks(
                            script, ["--turn", engine, preset, dtype], ranks, threads=threads
                        )
                    )
            yield preset, dtype, turns


def main() -> None:
    """Run all turns and print the rows."""
    o = parse(__doc__, ENGINES)
    if o.turn:
        engine, preset, dtype = o.turn
        run = run_fsdpc(preset, dtype) if engine == "fsdpc" else run_torch(engine, preset, dtype)
        common.leave_result(run)
        return
    common.header()
    rows = []
    for preset, dtype, turns in take_turns(__file__, o):
        tokens = 2 * BATCHES[preset][0] * BATCHES[preset][1]
        ms = {e: [statistics.median(t["seconds"]) * 1e3 for t in ts] for e, ts in turns.items()}
        ours = statistics.median(ms["fsdpc"]) if "fsdpc" in ms else float("nan")
        for e in o.engines:
            median = statistics.median(ms[e])
            pss = statistics.median(t["peak_pss_bytes"] for t in turns[e]) / 2**20
            rate = f"{tokens / median * 1e3:,.0f}"
            cells = [common.spread(ms[e]), rate, f"{median / ours:.2f}", f"{pss:,.0f}"]
            rows.append([f"Llama {preset} {dtype}", e, *cells])
    common.table(
        ["model", "engine", "ms a step (range)", "tokens/s", "time over fsdpc's", "peak PSS MiB"],
        rows,
    )


if __name__ == "__main__":
    main()
