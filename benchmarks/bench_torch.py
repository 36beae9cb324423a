"""The torch frontend against torch alone, DDP, FSDP2 and (where installed) DeepSpeed ZeRO-3.

    python benchmarks/bench_torch.py host                  # host cost per unit and step
    python benchmarks/bench_torch.py steps [--models mlp-128 llama-10M-fp32 ...] [--rounds 5]
                                           [--png benchmarks/torch.png]

``steps``: 2 ranks with one thread each; a step is forward, backward, clipping at 1.0 and AdamW
(fused), timed after a barrier. Engines take turns; each turn is a fresh set of processes whose
median step counts. "local" communicates nothing: what the computation costs. "fsdpc-kernels" is
fsdpc after ``use_kernels(model)``: linear layers on the engine's products; "fsdpc-torch-clip" clips
with torch's own function instead of fsdpc's. "fsdpc:HYBRID_SHARD" and "fsdp2:HYBRID_SHARD"
replicate between hosts (bench_hosts.py). "ddp@fsdpc" and "fsdp2@fsdpc" are torch's own over the
back end ``fsdpc`` instead of gloo. bf16 is autocast for local and DDP, param bf16 and reduce
fp32 for FSDP2 and fsdpc. "lora" models are fp32 with PEFT's adapters of rank 16 beside all linear
layers, and nothing else is trained. DeepSpeed runs on gloo.

``host``: rank 0 of a world of 8 whose peers pretend (FSDP2: a fake process group); units of n tiny
parameters; the time of forward and backward less that of the same model unsharded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

OURS = ("fsdpc", "fsdpc-kernels", "fsdpc-torch-clip")
ENGINES = (*OURS, "fsdp2", "ddp", "local")
BY_MPI = ("native-openmpi", "native-mpich")  # started by that MPI's launcher
NATIVE = ("native", "native-alone", *BY_MPI)  # bench_hosts.py's
MLPS = {"mlp-128": (12, 128), "mlp-256": (12, 256), "mlp-512": (8, 512)}
LLAMAS = {"10M": (2, 256), "41M": (1, 256), "125M": (1, 128)}
DTYPES = {"10M": ("fp32", "bf16"), "41M": ("fp32", "bf16", "lora"), "125M": ("lora",)}
MODELS = [*MLPS, *(f"llama-{p}-{d}" for p in LLAMAS for d in DTYPES[p])]
WARM, STEPS = 4, 12
SOON = 2  # steps before sums in low rank, which wait for 1,000 by default
UNITS = 8


def mlp(blocks: int, dim: int) -> Any:
    """A stack of x + gelu(linear(layer_norm(x)))."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.gelu(self.linear(self.norm(x)))

    return nn.Sequential(*[Block() for _ in range(blocks)])


def llama(preset: str) -> Any:
    """transformers' LLaMA in the shape of a preset."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fsdpc.models.config import preset as config_of

    c = config_of(preset)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.inner,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        max_position_embeddings=c.max_seq, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied,
        use_cache=False,
    ))  # fmt: skip


def workload(name: str) -> tuple[Any, list[Any], Callable[[Any], Any], str]:
    """A model, its units but the root, a function from model to loss, and its dtype."""
    import torch

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    if name in MLPS:
        blocks, dim = MLPS[name]
        model = mlp(blocks, dim)
        x = torch.randn(512, dim, generator=generator)
        return model, list(model), lambda m: m(x).square().mean(), "fp32"
    _, preset, dtype = name.split("-")
    model = llama(preset)
    units = list(model.model.layers)
    rows, words = LLAMAS[preset]
    ids = torch.randint(0, model.config.vocab_size, (rows, words + 1), generator=generator)
    if dtype == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))

    def loss(m: Any) -> Any:
        logits = m(input_ids=ids[:, :-1]).logits.flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())

    return model, units, loss, dtype


def ways(strategy: str) -> dict[str, Any]:
    """Our options for what follows an engine's colon: a strategy and a compression, if any."""
    import fsdpc

    words = [word for word in strategy.split(",") if word and not word.startswith("outer=")]
    forms = ",".join(word for word in words if "=" in word)
    found = {"strategy": next((word for word in words if "=" not in word), None)}
    if not forms:
        return found
    compression = fsdpc.Compression.parse(forms)
    if compression.replicas:
        soon = replace(compression.replicas, start_step=SOON)
        compression = replace(compression, replicas=soon)
    return {**found, "compression": compression}


def round_of(strategy: str) -> int:
    """Steps in a round of outer steps, of what follows an engine's colon; 0: none are made."""
    return int(strategy.partition("outer=")[2].partition(",")[0] or 0)


def step_counts(strategy: str) -> tuple[int, int]:
    """How many steps warm up, and how many are measured: whole rounds of outer steps."""
    every = round_of(strategy)
    return (every, 2 * every) if every else (WARM, STEPS)


def shard(engine: str, strategy: str, model: Any, units: list[Any], dtype: str) -> Any:
    """Hand the model to an engine; an empty strategy is the engine's own."""
    import torch

    low = torch.bfloat16 if dtype == "bf16" else None
    options: dict[str, Any] = {}
    if engine in OURS:
        from fsdpc.torch import MixedPrecisionPolicy, fully_shard, use_kernels

        if engine == "fsdpc-kernels":
            use_kernels(model)
        options = ways(strategy)
    elif engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        world, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        shape, names = (world // here, here), ("replicate", "shard")
        hybrid = init_device_mesh("cpu", shape, mesh_dim_names=names) if strategy else None
        options["mesh"] = hybrid or init_device_mesh("cpu", (world,))
    elif engine == "ddp":
        low_rank = strategy.startswith("powersgd")
        # Over gloo, the hook's callbacks post the sums of several buckets in different orders.
        caps = {"bucket_cap_mb": 2**12} if low_rank else {}
        model = torch.nn.parallel.DistributedDataParallel(model, **caps)
        if low_rank:
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

            state = theirs.PowerSGDState(
                None, int(strategy.removeprefix("powersgd")), start_powerSGD_iter=SOON
            )
            model.register_comm_hook(state, theirs.powerSGD_hook)
        return model
    else:
        return model
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for unit in units:
        fully_shard(unit, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def turn(engine: str, name: str) -> dict[str, Any]:
    """One turn on this rank."""
    engine, _, strategy = engine.partition(":")
    engine, _, backend = engine.partition("@")
    if engine in BY_MPI:
        import fsdpc

        fsdpc.init()
        return measure(native_step(engine, strategy, name), strategy, fsdpc.barrier)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "fsdpc":
        import fsdpc.torch
    dist.init_process_group(
        backend or "gloo", init_method=f"file://{os.environ['BENCH_STORE']}",
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    if engine in NATIVE:
        return measure(native_step(engine, strategy, name), strategy)
    model, units, loss_of, dtype = workload(name)
    if engine == "deepspeed":
        return measure(deepspeed_step(model, loss_of, dtype))
    model = shard(engine, strategy, model, units, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    if engine in OURS:
        from fsdpc.torch import clip_grad_norm_, optim

        optimizer: Any = optim.AdamW(trained, lr=3e-4)
        clip: Any = clip_grad_norm_
        if engine == "fsdpc-torch-clip":
            clip = torch.nn.utils.clip_grad_norm_
    else:
        optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
        clip = torch.nn.utils.clip_grad_norm_
    autocast = dtype == "bf16" and engine in ("local", "ddp")
    outer = None
    if every := round_of(strategy):
        from fsdpc.torch import Outer

        outer = Outer(model, every=every)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(model)
        loss.backward()
        clip(trained, 1.0)
        optimizer.step()
        if outer:
            outer.step()

    return measure(step, strategy)


def native_step(engine: str, strategy: str, name: str) -> Callable[[], None]:
    """A step of fsdpc's own LLaMA; its ranks have met, meet by torch's group, or not at all."""
    import bench_llama

    import fsdpc

    if engine == "native":
        import fsdpc.torch

        fsdpc.torch._mesh.join()
    elif engine == "native-alone":
        fsdpc.init(0, 1)
    _, preset, dtype = name.split("-")
    return bench_llama.fsdpc_step(preset, dtype, every=round_of(strategy), **ways(strategy))


def deepspeed_step(model: Any, loss_of: Any, dtype: str) -> Callable[[], None]:
    """ZeRO-3 on the CPU accelerator."""
    import deepspeed  # type: ignore[import-not-found]

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step() -> None:
        engine.backward(loss_of(engine))
        engine.step()

    return step


def measure(
    step: Callable[[], None], strategy: str = "", barrier: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Seconds of each step after the warm ones, from a barrier on, torch's by default.

    Steps of a round of outer steps count as their mean. "processor" has this rank's processor
    seconds of a step, without those of waits in a barrier.
    """
    if barrier is None:
        from torch.distributed import barrier

    times, used = [], []
    warm, steps = step_counts(strategy)
    for _ in range(warm + steps):
        barrier()
        begin, processor = time.perf_counter(), time.process_time()
        step()
        times.append(time.perf_counter() - begin)
        used.append(time.process_time() - processor)
    barrier()  # a rank that ended earlier would cut its peers' connections
    every = round_of(strategy) or 1
    return {
        "seconds": [sum(times[i : i + every]) / every for i in range(warm, warm + steps, every)],
        "processor": sum(used[warm:]) / steps,
    }


def run_steps(models: list[str], engines: list[str], rounds: int, png: Path | None) -> None:
    """All turns, and the table, a model at a time; the figure in the end."""
    medians: dict[str, dict[str, float]] = {}
    common.table(["model", "engine", "ms a step (range)", "over fsdpc's", "peak PSS MiB"], [])
    for name in models:
        turns: dict[str, list[dict[str, Any]]] = {e: [] for e in engines}
        for _ in range(rounds):
            for engine in engines:
                turns[engine].append(
                    common.run_ranks(__file__, ["turn", "--turn", engine, name], 2)
                )
        ms = {e: [statistics.median(t["seconds"]) * 1e3 for t in ts] for e, ts in turns.items()}
        medians[name] = {e: statistics.median(values) for e, values in ms.items()}
        ours = medians[name].get("fsdpc", float("nan"))
        for e in engines:
            pss = statistics.median(t["peak_pss_bytes"] for t in turns[e]) / 2**20
            over = f"{medians[name][e] / ours:.2f}"
            common.row([name, e, common.spread(ms[e]), over, f"{pss:,.0f}"])
    if png:
        draw(medians, png)


def draw(medians: dict[str, dict[str, float]], path: Path) -> None:
    """Bars of each engine's time over that of torch without communication, a group a model."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot as plt

    engines = [e for e in next(iter(medians.values())) if e != "local"]
    figure, axis = plt.subplots(figsize=(10, 3.8))
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        heights = [ms[engine] / ms["local"] for ms in medians.values()]
        at = [g + (i - (len(engines) - 1) / 2) * width for g in range(len(medians))]
        axis.bar(at, heights, width, label=engine)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(medians)), list(medians))
    axis.set(ylabel="step's time over local torch's", title="2 ranks x 1 thread; less is better")
    axis.legend()
    axis.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


# ---- host cost ----

HOSTS_PLAYED = {"fsdpc": 1, "fsdpc-2": 2, "fsdpc-4": 4}  # by an engine whose peers pretend


def tiny(params: int) -> Any:
    """Units of n parameters that compute next to nothing."""
    import torch
    from torch import nn

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ps = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(params)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.stack(list(self.ps)).sum(0)

    return nn.Sequential(*[Unit() for _ in range(UNITS)])


def host_turn(engine: str, params: int) -> dict[str, Any]:
    """Milliseconds of forward and backward of UNITS units."""
    import torch

    torch.set_num_threads(1)
    model = tiny(params)
    hosts = HOSTS_PLAYED.get(engine)
    if hosts:
        import fsdpc

        engine = "fsdpc"
        fsdpc.distributed.group._world = fsdpc._core.Comm(0, 8, None, hosts=hosts)
    if engine != "local":
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        os.environ["WORLD_SIZE"] = "8"
        shard(engine, "", model, list(model), "fp32")
    x = torch.ones(8)

    def step() -> float:
        begin = time.perf_counter()
        model(x).sum().backward()
        end = time.perf_counter()
        for p in model.parameters():
            p.grad = None
        return end - begin

    times = [step() for _ in range(60)][20:]
    return {"ms": statistics.median(times) * 1e3}


def run_host(rounds: int) -> None:
    """Host cost per unit and step, and FSDP2's over ours."""
    rows = []
    for params in (2, 9, 40, 200):
        engines = ("local", *HOSTS_PLAYED, "fsdp2")
        turns: dict[str, list[float]] = {e: [] for e in engines}
        for _ in range(rounds):
            for e in engines:
                found = common.run_ranks(__file__, ["turn", "--host", e, str(params)], 1)
                turns[e].append(found["ms"])
        base = statistics.median(turns["local"])
        cost = {e: (statistics.median(turns[e]) - base) / (UNITS + 1) for e in engines[1:]}
        rows.append([
            params, *(f"{cost[e] * 1e3:.1f}" for e in HOSTS_PLAYED), f"{cost['fsdp2'] * 1e3:.0f}",
            f"{cost['fsdp2'] / cost['fsdpc']:.1f}",
        ])  # fmt: skip
    common.table(
        ["parameters a unit", "fsdpc us", "on 2 hosts", "on 4", "FSDP2 us", "FSDP2's over fsdpc's"],
        rows,
    )


def main() -> None:
    """Run the chosen benchmarks."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=("host", "steps", "turn"))
    p.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    p.add_argument("--engines", nargs="+", default=None)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--png", type=Path, help="draw the comparison of steps; needs local among them")
    p.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    p.add_argument("--host", nargs=2, help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.what == "turn":
        common.leave_result(turn(*o.turn) if o.turn else host_turn(o.host[0], int(o.host[1])))
        return
    common.header()
    print(f"load average before: {os.getloadavg()[0]:.1f}\n")
    installed = ("deepspeed",) if importlib.util.find_spec("deepspeed") else ()
    if o.what == "host":
        run_host(o.rounds)
    else:
        engines = list(o.engines or (*ENGINES, *installed))
        if o.png and "local" not in engines:
            p.error("--png shows times over local's: name local among --engines")
        run_steps(o.models, engines, o.rounds, o.png)


if __name__ == "__main__":
    main()
