"""simulate() beside published and recorded steps, and worlds of up to 16,384 ranks.

    python benchmarks/bench_simulate.py [--only rows|scale]

The tables of docs/simulate.md, which says where the measured figures come from. Nothing runs but
the schedule, so any machine prints the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

import fsdpc
from fsdpc import nn, wrap
from fsdpc.models import Llama, ModelConfig, preset

HALF = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
LLAMA_8B = ModelConfig(
    vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, inner=14336, max_seq=8192
)
LLAMA_70B = LLAMA_8B.with_(dim=8192, layers=80, heads=64, inner=28672)
H100 = {"device": "cuda", "mp_policy": HALF, "bandwidth": 400e9, "latency": 5e-6,
        "local_bandwidth": 360e9, "local_latency": 2e-6}  # fmt: skip
A100 = {**H100, "bandwidth": 50e9, "local_bandwidth": 240e9}

#: From rows/hosts.jsonl, by the number of the source in docs/simulate.md: wire, dtype,
#: engine, ms a step alone and together. bench_hosts.CORE was fitted to the first.
RECORDED = {
    5: [("none", "fp32", "fsdpc", 334, 430), ("none", "bf16", "fsdpc", 207, 276),
        ("1gbit", "fp32", "fsdpc", 316, 525), ("1gbit", "bf16", "fsdpc", 222, 378)],
    6: [("1gbit", "fp32", "fsdpc:HYBRID_SHARD", 983, 1160),
        ("1gbit", "bf16", "fsdpc:HYBRID_SHARD", 692, 857),
        ("1gbit", "fp32", "fsdpc", 474, 638), ("1gbit", "fp32", "fsdpc:NO_SHARD", 474, 640),
        ("1gbit", "fp32", "native", 378, 565), ("1gbit", "bf16", "fsdpc", 322, 432),
        ("1gbit", "bf16", "fsdpc:NO_SHARD", 322, 525), ("1gbit", "bf16", "native", 202, 354),
        ("none", "fp32", "fsdpc", 454, 550), ("none", "fp32", "fsdpc:NO_SHARD", 454, 595),
        ("none", "fp32", "native", 370, 481), ("none", "bf16", "fsdpc", 341, 412),
        ("none", "bf16", "fsdpc:NO_SHARD", 341, 452), ("none", "bf16", "native", 231, 293)],
}  # fmt: skip


def play_recorded(wire: str, dtype: str, engine: str, alone_ms: float) -> Any:
    """Simulate a row of RECORDED: HYBRID_SHARD has two ranks a host, others one."""
    import bench_hosts

    strategy = engine.partition(":")[2]
    ranks = 4 if strategy == "HYBRID_SHARD" else 2
    return bench_hosts.simulated(f"llama-10M-{dtype}", ranks, wire, alone_ms, strategy)


def build(config: ModelConfig, recompute: Any = None) -> Llama:
    """A model without memory, with blocks that are computed again in backward."""
    with fsdpc.deferred_init():
        model = Llama(config)
    if recompute:
        fsdpc.checkpoint_activations(model.blocks(), recompute)
    return model


def fit(model: Llama, shape: tuple[int, int], seconds: float, **options: Any) -> float:
    """The rate of computation by which a step takes so long."""
    rate = 1e15
    for _ in range(4):
        found = fsdpc.simulate(model, shape, flops=rate, **options)
        rate = found.flops / (seconds - found.exposed_total)
    return rate


def row(what: str, measured: float, simulated: float, unit: str) -> None:
    """One line of the table of errors; simulated 0: the computation was fitted to it."""
    digits = 3 if unit == "s" else 0
    shown = ["fitted", ""]
    if simulated:
        shown = [f"{simulated:,.{digits}f} {unit}", f"{100 * (simulated / measured - 1):+.1f} %"]
    common.row([what, f"{measured:,.{digits}f} {unit}", *shown])


def rows() -> None:
    """Published steps, and those of rows/hosts.jsonl."""
    common.table(["row", "measured", "simulated", "error"], [])
    model, on_4 = build(preset("SmolLM3-3B")), {**H100, "hosts": 1, "ranks_per_host": 4}
    rate = fit(model, (1, 8192), 0.974, strategy="SHARD_GRAD_OP", **on_4)
    row("1. SmolLM3-3B, 4 H100, ZeRO-2", 0.974, 0, "s")
    found = fsdpc.simulate(model, (1, 8192), flops=rate, strategy="FULL_SHARD", **on_4)
    row("1. the same, ZeRO-3", 0.997, found.step, "s")
    model = build(LLAMA_8B)
    for label, on_8, on_128 in (("", 5762, 5605), (", compiled", 6667, 6514)):
        rate = fit(model, (2, 8192), 16384 / on_8, hosts=1, ranks_per_host=8, **H100)
        row(f"2. Llama 3.1 8B, 8 H100{label}", on_8, 0, "tokens/s a GPU")
        found = fsdpc.simulate(
            model, (2, 8192), hosts=16, ranks_per_host=8, flops=rate, **H100
        )
        row(f"2. the same, 128 H100{label}", on_128, 16384 / found.step, "tokens/s a GPU")
    rate = fit(model, (2, 8192), 16384 / 10938, hosts=4, ranks_per_host=8, **H100)
    row("3. Llama 3.1 8B, 32 H200", 10938, 0, "tokens/s a GPU")
    found = fsdpc.simulate(model, (2, 8192), hosts=8, ranks_per_host=8, flops=rate, **H100)
    row("3. the same, 64 H200", 10753, 16384 / found.step, "tokens/s a GPU")
    on_64 = {**A100, "hosts": 8, "ranks_per_host": 8}
    rate = fit(build(LLAMA_8B, 2), (1, 8192), 8192 / 2904, **on_64)
    row("4. Llama 3 8B, 64 A100", 2904, 0, "tokens/s a GPU")
    found = fsdpc.simulate(build(LLAMA_70B, "all"), (1, 8192), flops=rate, **on_64)
    row("4. Llama 3 70B, 64 A100", 331, 8192 / found.step, "tokens/s a GPU")
    fitted = True  # the first
    for source, recorded in RECORDED.items():
        for wire, dtype, engine, alone, measured in recorded:
            found = play_recorded(wire, dtype, engine, alone)
            label = "1 Gbit/s" if wire == "1gbit" else "unshaped"
            what = f"{source}. 10M {dtype}, {engine}, {label}"
            row(what, measured, 0 if fitted else found.step * 1e3, "ms")
            fitted = False


def scale() -> None:
    """Padding, messages and memory of 7B and 70B in growing worlds."""
    common.table(["model", "ranks", "padding %", "messages a rank", "exposed ms",
                  "exposed ms, HYBRID_SHARD", "GiB a rank"], [])  # fmt: skip
    on = {**H100, "ranks_per_host": 8, "flops": 400e12}
    computed = []
    for name in ("7B", "70B"):
        model = build(preset(name))
        for hosts in (1, 8, 64, 128, 256, 512, 1024, 2048):
            full, hybrid = (
                fsdpc.simulate(model, (1, 4096), hosts=hosts, strategy=s, **on)
                for s in ("FULL_SHARD", "HYBRID_SHARD")
            )
            held = full.memory.total - (full.memory.activation or 0)
            common.row([name, f"{8 * hosts:,}", f"{100 * full.padding:.2f}", f"{full.messages:,}",
                        f"{1e3 * full.exposed_total:,.0f}", f"{1e3 * hybrid.exposed_total:,.0f}",
                        f"{held / 2**30:.2f}"])  # fmt: skip
        computed.append(f"{name} in {1e3 * full.compute:,.0f} ms")
    print(f"\n(computed: {', '.join(computed)})\n")
    common.table(["units of 7B", "ranks", "padding %", "messages a rank", "exposed ms"], [])
    model = build(preset("7B"))
    plans: dict[str, Any] = {"blocks": None, "linear layers": wrap.by_class(nn.Linear), "one": {}}
    for label, plan in plans.items():
        for hosts in (8, 128, 2048):
            found = fsdpc.simulate(model, (1, 4096), hosts=hosts, plan=plan, **on)
            common.row([label, f"{8 * hosts:,}", f"{100 * found.padding:.2f}",
                        f"{found.messages:,}", f"{1e3 * found.exposed_total:,.0f}"])  # fmt: skip
    print()
    common.table(["7B, hosts of 8 CPUs", "GB a host, FULL_SHARD", "GB a host, HYBRID_SHARD"], [])
    for hosts in (2, 4, 8, 32):
        full, hybrid = (
            fsdpc.simulate(model, (1, 4096), hosts=hosts, strategy=s,
                           **{**on, "device": "cpu"})  # fmt: skip
            for s in ("FULL_SHARD", "HYBRID_SHARD")
        )
        common.row([hosts, f"{full.sent_between / 1e9:.1f}", f"{hybrid.sent_between / 1e9:.1f}"])


def main() -> None:
    """Print the tables."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", choices=("rows", "scale"))
    o = p.parse_args()
    common.header()
    for part in (rows, scale):
        if o.only in (None, part.__name__):
            part()
            print()


if __name__ == "__main__":
    main()
