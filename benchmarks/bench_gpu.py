"""Tokens a second and MFU of LLaMA shapes on one GPU: both frontends next to torch FSDP2.

    python benchmarks/bench_gpu.py [--shapes 125M 1B SmolLM3-3B] [--engines native fsdp2 ...]

World 1, bf16 parameters and fp32 reductions; a step is forward, backward, clipping at 1.0 and AdamW
over sequences of random words. "native" is fsdpc's own LLaMA, "door" transformers' under
fsdpc.torch, "fsdp2" the same under torch's FSDP2, "torch" the same under autocast alone; "+compile"
compiles each block, "+graph" replays one graph of the whole step, "+cudnn0" and "+cudnn1" set
FSDPC_CUDNN: attention by our kernels, or by cuDNN with a backward in a fixed order.
"native+ranks2" is two ranks that share the GPU, with half of the rows each.

Each engine runs in a process of its own: warm steps, then several stretches of steps with one wait
for the GPU at the end of each; the median stretch counts. An engine that fails, or takes longer
than it may, keeps its row, with the reason.

MFU is over --peak (an H100's 989 TFLOP/s of dense bf16) and over what a product of torch's reaches
on this GPU, by fsdpc's formula (6 x matmul parameters with the head, causal half of attention), and
in the last column by that of the study whose 4 H100 reach 20.5 % and 8,415 tokens/s a GPU on
SmolLM3-3B: 6 [h (n + 2 kv) d + 2 n s d + n d h + 3 h I] L, all of attention and no head.

``--device cpu`` runs the same code without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import checks
import common
from bench_llama import torch_llama

from fsdpc.models.config import ModelConfig, preset

# The baseline first: whatever stops a run, ours are never without it.
ENGINES = ("fsdp2", "torch", "door", "native", "native+graph", "native+graph+cudnn0",
           "native+graph+cudnn1", "native+ranks2", "fsdp2+compile", "torch+compile", "door+compile")
# Rows, words of a row, and whether activations are computed again: what 80 GB hold.
SHAPES = {"2M": (1, 64, True), "125M": (16, 2048, False), "1B": (8, 2048, False),
          "SmolLM3-3B": (1, 8192, True)}
WARM, STEPS, STRETCHES = 3, 5, 3
PEAK_SIZE = {"cuda": 8192, "cpu": 256}
DUMP_S = 5.0  # before a turn is cut off, it says where it is
LEAST_S = 10.0  # that a turn is begun for


def published_flops_per_token(c: ModelConfig, seq: int) -> float:
    """The study's count: no causal halving, no head."""
    d, n, kv = c.head_dim, c.heads, c.kv_heads
    block = c.dim * (n + 2 * kv) * d + 2 * n * seq * d + n * d * c.dim + 3 * c.dim * c.inner
    return 6.0 * block * c.layers


def words(shape: str) -> Any:
    """The same random words for every engine: (rows, seq + 1)."""
    import numpy as np

    rows, seq, _ = SHAPES[shape]
    return np.random.default_rng(0).integers(0, preset(shape).vocab_size, (rows, seq + 1))


Step = Callable[[], Any]
Turn = tuple[Step, Callable[[], None], Callable[[], int]]  # a step, a wait, peak bytes


def native(engine: str, shape: str, device: str) -> Turn:
    """Our own LLaMA on our own tensors."""
    import fsdpc
    from fsdpc import models

    fsdpc.set_default_device(device)
    fsdpc.manual_seed(0)
    with fsdpc.deferred_init():
        model = models.Llama(preset(shape))
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
    if SHAPES[shape][2]:
        fsdpc.checkpoint_activations(model.blocks())
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=policy)
    fsdpc.fully_shard(model, mp_policy=policy)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=3e-4)
    ids = words(shape)[fsdpc.rank() :: fsdpc.world_size()]
    x, y = fsdpc.tensor(ids[:, :-1].copy()), fsdpc.tensor(ids[:, 1:].copy())
    last: list[Any] = [None]

    def step() -> None:
        optimizer.zero_grad()
        last[0] = model(x, y)
        last[0].backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()

    if "+graph" in engine:
        for _ in range(2):
            step()
        optimizer.zero_grad()
        with fsdpc.graph_step(model, optimizer) as graph:
            step()
            optimizer.zero_grad()
        step = graph.replay
    return step, lambda: float(last[0]), lambda: fsdpc.memory_stats()["total_peak_bytes"]


def expect_no_packed_sequences() -> None:
    """Tell transformers that each row is one sequence.

    It asks the GPU at every forward, and waits for the answer there: time that FSDP2 would lose to
    its model, not to sharding.
    """
    from transformers import masking_utils

    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = lambda *_, **__: None


def torch_engine(engine: str, shape: str, device: str) -> Turn:
    """transformers' LLaMA under fsdpc.torch, FSDP2 or autocast alone."""
    import torch
    import torch.distributed as dist

    import fsdpc

    name, _, how = engine.partition("+")
    torch.manual_seed(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=0, world_size=1,
                            init_method=f"file://{os.environ['BENCH_STORE']}")
    expect_no_packed_sequences()
    with torch.device(device):
        model, _ = torch_llama(shape)
    if name == "door":
        from fsdpc.torch import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, optim

        if device == "cuda":
            fsdpc.set_default_device("cuda")
        clip, adamw, options = clip_grad_norm_, optim.AdamW, {}
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        clip, adamw = torch.nn.utils.clip_grad_norm_, torch.optim.AdamW
        options = {"fused": True}
        if name == "torch":
            fully_shard = lambda module, **_: module  # noqa: E731
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if SHAPES[shape][2]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for layer in model.model.layers:
        if how == "compile":
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = adamw(model.parameters(), lr=3e-4, **options)
    ids = torch.from_numpy(words(shape)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=name == "torch"):
            logits = model(input_ids=ids[:, :-1]).logits
        logits = logits.flatten(0, 1).float()
        torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()

    if device == "cpu":
        return step, lambda: None, lambda: 0
    ours = fsdpc.memory_stats if name == "door" else lambda: {"total_peak_bytes": 0}
    return step, torch.cuda.synchronize, lambda: (
        torch.cuda.max_memory_allocated() + ours()["total_peak_bytes"])


def turn(engine: str, shape: str, device: str) -> dict[str, Any]:
    """Seconds of a step in each stretch, and the peak of memory."""
    step, wait, peak = (native(engine, shape, device) if engine.startswith("native")
                        else torch_engine(engine, shape, device))
    for _ in range(WARM):
        step()
    wait()
    seconds = common.stretches(step, wait, STEPS, STRETCHES)
    return {"seconds": seconds, "peak_bytes": peak()}


def product_flops(device: str) -> float:
    """FLOP/s of a square bf16 product by torch, in the best of several stretches."""
    import torch

    n = PEAK_SIZE[device]
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    best = min(common.stretches(lambda: a @ b, wait, 10, 6))  # the first ones warm up
    return 2.0 * n**3 / best


def row(engine: str, shape: str, found: dict[str, Any], peak: float, reached: float) -> list[str]:
    """The cells of one engine."""
    config, (rows, seq, _) = preset(shape), SHAPES[shape]
    rate = rows * seq / statistics.median(found["seconds"])
    ours = rate * config.flops_per_token(seq)
    study = rate * published_flops_per_token(config, seq)
    return [shape, engine, common.spread([s * 1e3 for s in found["seconds"]]), f"{rate:,.0f}",
            f"{ours / peak:.1%}", f"{ours / reached:.1%}", f"{study / peak:.1%}",
            f"{found['peak_bytes'] / 2**30:.1f}"]


def run_alone(arguments: list[str], limit_s: float, **environment: str) -> dict[str, Any]:
    """What this script leaves as its result in a process of its own; RuntimeError says why not."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environment |= {"BENCH_RESULT": str(result), "BENCH_STORE": str(Path(folder) / "store"),
                        "OMP_NUM_THREADS": "1"}
        ranks = ["-m", "fsdpc", "run", "--ranks", "2"] if "native+ranks2" in arguments else []
        command = (sys.executable, *ranks, __file__, *arguments, "--limit", str(limit_s))
        ended = checks.run(checks.Check("", command, cap_s=limit_s, environment=environment))
        print(ended.stdout + ended.stderr, end="", file=sys.stderr, flush=True)
        if not result.exists():
            raise RuntimeError(ended.verdict)
        return json.loads(result.read_text())


def without_cudnn(engines: list[str]) -> list[str]:
    """The engines that can run: those on cuDNN's attention only where the plugin has it."""
    if not any("+cudnn1" in engine for engine in engines):
        return engines
    plugin = common.plugin_says()[0]
    if "attention by cuDNN " in plugin:
        return engines
    print(f"no engine on cuDNN's attention; the plugin: {plugin}\n")
    return [engine for engine in engines if "+cudnn1" not in engine]


def measure(engine: str, shape: str, rest: list[str], limit_s: float) -> dict[str, Any]:
    """The turn of one engine."""
    if limit_s < LEAST_S:
        raise RuntimeError("not run: the time of this shape is over")
    _, asked, level = engine.partition("+cudnn")
    cudnn = {"FSDPC_CUDNN": level} if asked else {}
    return run_alone(["--turn", engine, shape, *rest], limit_s, **cudnn)


def main() -> None:
    """Run the chosen benchmarks and print the rows."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--shapes", nargs="+", default=list(SHAPES)[1:], choices=list(SHAPES))
    p.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    p.add_argument("--rows", type=int, help="of every batch, instead of the shape's own")
    p.add_argument("--keep", action="store_true", help="keep activations of every shape")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--peak", type=float, default=989, help="TFLOP/s that the maker promises")
    p.add_argument("--turn-seconds", type=float, default=90, help="an engine's at most")
    p.add_argument("--shape-seconds", type=float, default=600, help="of all engines on a shape")
    p.add_argument("--turn", nargs=2, metavar=("ENGINE", "SHAPE"), help=argparse.SUPPRESS)
    p.add_argument("--product", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    o = p.parse_args()
    for shape, (rows, seq, again) in SHAPES.items():
        SHAPES[shape] = (o.rows or rows, seq, again and not o.keep)
    if o.turn or o.product:
        faulthandler.dump_traceback_later(max(o.limit - DUMP_S, DUMP_S / 5))
        common.leave_result({"flops": product_flops(o.device)} if o.product
                            else turn(*o.turn, o.device))
        return
    checks.end_by_exception()
    if o.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or FSDP2 takes its GPU's mesh
    common.header()
    rest = ["--device", o.device, *(["--rows", str(o.rows)] if o.rows else []),
            *(["--keep"] if o.keep else [])]
    engines = without_cudnn(o.engines)
    failed, reached = 0, float("nan")
    try:
        reached = run_alone(["--product", *rest], o.turn_seconds)["flops"]
        print(f"a bf16 product of {PEAK_SIZE[o.device]}: {reached / 1e12:.3g} TFLOP/s\n")
    except RuntimeError as error:
        failed += 1
        print(f"a bf16 product of {PEAK_SIZE[o.device]}: {error}\n")
    common.table(["shape", "engine", "ms a step (range)", "tokens/s", f"MFU of {o.peak:g}",
                  "of the product", "by the study's count", "peak GiB"], [])
    for shape in o.shapes:
        end = time.monotonic() + o.shape_seconds
        for engine in engines:
            try:
                limit_s = min(o.turn_seconds, end - time.monotonic())
                found = measure(engine, shape, rest, limit_s)
                cells = row(engine, shape, found, o.peak * 1e12, reached)
            except RuntimeError as error:
                failed += 1
                cells = [shape, engine, str(error)[:200].replace("|", "/"), *[""] * 5]
            common.row(cells)
    sys.exit(f"{failed} measurements failed" if failed else 0)


if __name__ == "__main__":
    main()
