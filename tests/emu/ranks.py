"""What ranks on the emulated GPU (or the CPU) do; prints what each returned as JSON.

    ranks.py WHAT DEVICE RANKS [ARGUMENT]
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from training import MAX_NORM, MODELS, ON_GPU, build

import fsdpc
from fsdpc import _core

STEPS, MICRO_STEPS = 2, 2
CLIPPED = MAX_NORM / 16  # below the smallest norm, that of the largest element
CATEGORIES = ("unsharded", "master", "grad", "state", "reduce")
HALF = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
Result = tuple[list[float], list[float], str]


def variants() -> dict[str, dict[str, Any]]:
    """Options of fully_shard by name, for every strategy and mesh of this world."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD")
    found: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in names}
    ranks = fsdpc.world_size()
    for replicas in (n for n in (1, 2, 4) if ranks % n == 0):
        shape = (replicas, ranks // replicas)
        mesh = fsdpc.init_device_mesh(fsdpc.get_default_device(), shape)
        for name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
            found[f"{name} {shape[0]}x{shape[1]}"] = {"mesh": mesh, "strategy": name}
    return found


def train(model: Any, name: str, micro_steps: int = MICRO_STEPS, whole: bool = False) -> Result:
    """Train on batches of (step, micro-step, rank); losses, norms, a digest of the parameters.

    Losses are divided by micro-steps, or left `whole` and the engine divides.
    """
    for module in model.modules() if whole else ():
        if isinstance(module, fsdpc.FSDPModule):
            module.set_gradient_divide_factor(micro_steps * fsdpc.world_size())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = fsdpc.optim.AdamW(trained, lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(micro_steps):
            number = micro * fsdpc.world_size() + fsdpc.rank()
            loss = model(*MODELS[name][1](np.random.default_rng([step, number])))
            (loss if whole else loss / micro_steps).backward()
            losses.append(float(loss))
        norms.append(float(fsdpc.clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(fsdpc.full_tensor(p).numpy().tobytes())
    return losses, norms, digest.hexdigest()


def strategies(names: str) -> dict[str, Any]:
    """Train these models under every strategy, in both dtypes."""
    results: dict[str, Any] = {"transport": fsdpc.distributed.world().transport}
    for name in names.split(","):
        for dtype in ("fp32", "bf16"):
            results[f"{name} {dtype}"] = {
                variant: train(build(name, dtype, **options), name)
                for variant, options in variants().items()
            }
    return results


def deterministic(argument: str) -> dict[str, Any]:
    """Contributions to a step, however many ranks give them, by strategies of theirs.

    The argument is dtypes, and after a colon how many there are (four). Returns norms and digest,
    and bytes of reduce buffers as held at most and as planned.
    """
    dtypes, _, total = argument.partition(":")
    name, micro_steps = "perceptron", int(total or 4) // fsdpc.world_size()

    def one(dtype: str, mesh: Any = None, strategy: str | None = None) -> Any:
        before = fsdpc.memory_stats()["reduce_bytes"]
        fsdpc.reset_peak_memory_stats()
        model = build(name, dtype, mesh=mesh, strategy=strategy)
        result = train(model, name, micro_steps, whole=bool(total))[1:]
        held = fsdpc.memory_stats()["reduce_peak_bytes"] - before
        return [result, [held, fsdpc.memory_plan(model, mesh, strategy=strategy).reduce]]

    alone = fsdpc.world_size() == 1
    chosen = {"FULL_SHARD": {"strategy": "FULL_SHARD"}} if alone else variants()
    return {f"{variant} {dtype}": one(dtype, **options)
            for dtype in dtypes.split(",") for variant, options in chosen.items()}


def meshes(_: str) -> dict[str, Any]:
    """Losses of a model whose units are on the rows, the columns and all of a grid."""
    grid = fsdpc.init_device_mesh(fsdpc.get_default_device(), (2, 2))
    fsdpc.manual_seed(1)
    model = fsdpc.nn.Sequential(*(fsdpc.nn.Linear(48, 48) for _ in range(6)))
    for i, layer in enumerate(model):
        fsdpc.fully_shard(layer, mesh=(grid["replicate"], grid["shard"], grid)[i % 3])
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        x = np.random.default_rng([step, fsdpc.rank()]).normal(size=(8, 48)).astype(np.float32)
        y = model(fsdpc.tensor(x))
        loss = (y * y).mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return {"transport": fsdpc.distributed.world().transport, "losses": losses}


def matrices(_: str) -> list[str]:
    """Digests of a matrix stepped by Muon and Adafactor; every rank has the same gradients."""
    found = []
    for kind, options in (("Muon", {}), ("Muon", {"ns_dtype": "bfloat16"}), ("Adafactor", {})):
        model = build("coded")
        optimizer = getattr(fsdpc.optim, kind)(model.parameters(), lr=1e-2, **options)
        for step in range(3):
            model(*MODELS["coded"][1](np.random.default_rng(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        digest = hashlib.sha256(fsdpc.full_tensor(model.w).numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def ahead(_: str) -> dict[str, Any]:
    """What came of a step, by strategy: made as ever, and while the device stands still."""
    chosen = {"FULL_SHARD": 2, "NO_SHARD": 1, "HYBRID_SHARD 2x1": 2, "HYBRID_SHARD 2x2": np.inf}
    if fsdpc.world_size() == 2:
        chosen["SHARD_OPTIM"] = np.inf
    return {name: [one_ahead(still, chosen[name], **variants()[name]) for still in (0, 1)]
            for name in sorted(variants().keys() & chosen)}


def one_ahead(still: int, p: float, **options: Any) -> dict[str, Any]:
    """Make three steps, the last while the device stands still if so; what came of that.

    They are clipped by a p-norm. Waits are those of the host in the last one.
    """
    plugin = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"])
    model = build("perceptron", **options)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    rng = np.random.default_rng(fsdpc.rank())
    batch = tuple(fsdpc.tensor(array) for array in MODELS["perceptron"][1](rng))

    def step() -> tuple[Any, Any]:
        loss = model(*batch)
        loss.backward()
        norm = fsdpc.clip_grad_norm_(model, CLIPPED, p)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    for _ in range(2):
        float(step()[0])
    gc.collect()  # what was dropped has streams, which are waited for
    fsdpc.distributed.barrier()
    before = plugin.emu_waits()
    plugin.emu_stall(still)
    try:
        loss, norm = step()
    finally:
        plugin.emu_stall(0)
    waits = plugin.emu_waits() - before
    values = [fsdpc.full_tensor(p).numpy().ravel() for p in model.parameters()]
    return {"waits": waits, "norm": float(norm), "clipped": float(norm) > CLIPPED,
            "loss": float(loss), "values": np.concatenate(values).tolist()}


def checkpoint(path: str) -> list[Any]:
    """Train and save, or load and save again beside it if there is one."""
    model = build("perceptron", strategy="FULL_SHARD")
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    if os.path.exists(path):
        fsdpc.checkpoint.load(path, state)
        path = f"{path}-{fsdpc.get_default_device()}-{fsdpc.world_size()}"
    else:
        model(*MODELS["perceptron"][1](np.random.default_rng(fsdpc.rank()))).backward()
        optimizer.step()
    fsdpc.checkpoint.save(path, state)
    return []


def death(path: str) -> list[Any]:
    """The last rank is killed while the others reduce gradients; what they learn, and how late."""
    model = build("perceptron", strategy="SHARD_GRAD_OP")  # gathers nothing in backward
    train(model, "perceptron")
    loss = model(*MODELS["perceptron"][1](np.random.default_rng(0)))
    if fsdpc.rank() == fsdpc.world_size() - 1:
        Path(path).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
        float(fsdpc.clip_grad_norm_(model, MAX_NORM))  # over NCCL the host may be ahead till here
    except fsdpc.PeerError as error:
        text, ended = str(error), time.monotonic()
        Path(f"{path}-{fsdpc.rank()}").write_text(json.dumps([text, ended]))
    return []


def who(_: str) -> list[Any]:
    """The transport, and values of the user's own."""
    world = fsdpc.distributed.world()
    rank = fsdpc.rank()
    return [world.transport, fsdpc.all_reduce(rank + 0.5), fsdpc.all_gather(rank).tolist(),
            fsdpc.broadcast(rank, root=1), fsdpc.all_reduce(np.arange(3) * rank).tolist(),
            fsdpc.all_reduce(fsdpc.tensor([rank + 0.5, -rank]), "max").tolist()]


#: Fulls take turns where they fill the granules of the driver: 2 MiB on GPUs, less on the emulated.
DEEP = 1500 if ON_GPU else 256


class Deep(fsdpc.nn.Module):
    """Blocks whose unsharded parameters are worth taking turns for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = fsdpc.nn.ModuleList([fsdpc.nn.Linear(DEEP, DEEP) for _ in range(4)])
        self.head = fsdpc.nn.Linear(DEEP, 4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return (self.head(x) * self.head(x)).mean()

    def blocks(self) -> list[fsdpc.nn.Module]:
        return list(self.layers)


def ways(_: str) -> dict[str, Any]:
    """Say how ranks communicate; descriptors and mapped device memory around models.

    Device memory is told by the name that the emulated device gives it. The fake NCCL keeps a
    descriptor for every identity, which is not counted.
    """
    def count() -> list[int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        return [sum("fake NCCL" not in name for name in opened),
                maps.count("emulated device memory")]

    found: dict[str, Any] = {"transport": fsdpc.show_config(print_=False)["transport"]}
    found["before"] = count()
    models = [build("perceptron", **options) for options in variants().values()]
    for model in models:
        train(model, "perceptron")
    found["with"] = count()
    del models, model
    found["after"] = count()
    return found


def memory(_: str) -> dict[str, Any]:
    """Unsharded bytes as planned and as held, and a digest of the weights, by strategy.

    The last gathers two units ahead, and so has three slots where the first has two.
    """
    results = {}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "FULL_SHARD ahead"):
        strategy, *ahead = name.split()
        fsdpc.manual_seed(0)
        model = Deep()
        before = fsdpc.memory_stats()["unsharded_bytes"]
        planned = fsdpc.memory_plan(model, fsdpc.world_size(), strategy=strategy,
                                    plan={"layers.*": {}})
        for module in (*model.layers, model):
            fsdpc.fully_shard(module, strategy=strategy)
        if ahead:
            model.set_prefetch_distance(2)
            planned = fsdpc.memory_plan(model)
        optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            model(fsdpc.tensor(np.full((2, DEEP), step + 1, np.float32))).backward()
            optimizer.step()
            optimizer.zero_grad()
        held = fsdpc.memory_stats()["unsharded_bytes"] - before
        digest = hashlib.sha256()
        for p in model.parameters():
            digest.update(fsdpc.full_tensor(p).numpy().tobytes())
        found = fsdpc.memory_plan(model, strategy=strategy)
        results[name] = [held, found.unsharded, planned.unsharded, digest.hexdigest()]
        del model, optimizer
    return results


class Wide(Deep):
    """Blocks of which each nearly fills 2 MiB in bf16, and some that are far smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = fsdpc.nn.ModuleList([fsdpc.nn.Linear(1000, 1000) for _ in range(3)]
                                          + [fsdpc.nn.LayerNorm(1000) for _ in range(3)])
        self.head = fsdpc.nn.Linear(1000, 4)


#: Models, what each is given, and under which strategies.
PLANNED: dict[str, tuple[Callable[[], Any], tuple[np.ndarray, ...], tuple[str, ...]]] = {
    "wide": (Wide, (np.ones((2, 1000), np.float32),), ("FULL_SHARD", "SHARD_GRAD_OP")),
    "deep": (Deep, (np.ones((2, DEEP), np.float32),), ("FULL_SHARD", "SHARD_OPTIM", "NO_SHARD")),
    "llama": (MODELS["llama"][0], (np.zeros((2, 16), int), np.zeros((2, 16), int)),
              ("HYBRID_SHARD 2x1", "HYBRID_SHARD_ZERO2 1x2", "SHARD_GRAD_OP")),
}


def planned(_: str) -> dict[str, Any]:
    """What models take by strategy: peaks by category, and as planned."""
    return {f"{name} {variant}": one_planned(name, **options)
            for name, (_, _, chosen) in PLANNED.items()
            for variant, options in variants().items() if variant in chosen}


def one_planned(name: str, **options: Any) -> list[dict[str, int]]:
    """Train one of them for two steps."""
    make, batch, _ = PLANNED[name]
    gc.collect()
    before = fsdpc.memory_stats()
    fsdpc.reset_peak_memory_stats()
    model = make()
    for module in (*model.blocks(), model):
        fsdpc.fully_shard(module, mp_policy=HALF, **options)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for _ in range(2):
        model(*(fsdpc.tensor(a) if a.dtype.kind == "f" else a for a in batch)).backward()
        fsdpc.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    after = fsdpc.memory_stats()
    plan = fsdpc.memory_plan(model, options.get("mesh"), strategy=options["strategy"])
    return [{key: after[f"{key}_peak_bytes"] - before[f"{key}_bytes"] for key in CATEGORIES},
            {key: getattr(plan, key) for key in CATEGORIES}]


class Lent(np.ndarray):
    """An array that tells when it goes."""

    def __del__(self) -> None:
        GIVEN_BACK.append(True)


GIVEN_BACK: list[bool] = []


def drop_what_is_in_use(_: str) -> list[Any]:
    """Press Ctrl-C while a tensor of another library waits for a stream that stands still."""
    import foreign

    cuda = foreign.Runtime()
    t = _core.from_dlpack(foreign.relabel(np.arange(6, dtype=np.float32).view(Lent).__dlpack__(),
                                          foreign.CUDA))
    held = cuda.block(_core.stream_handle())
    y = t * 2
    later = [threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)),
             threading.Timer(20, held.set)]  # in vain
    for timer in later:
        timer.start()
    pressed = False
    try:
        del t
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        pressed = True
    given_back = list(GIVEN_BACK)
    for timer in later:
        timer.cancel()
    held.set()
    cuda.synchronize(_core.stream_handle())
    del y
    return [pressed, given_back]


class Scorer(fsdpc.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = fsdpc.nn.Linear(8, 16), fsdpc.nn.Linear(16, 64, bias=False)

    def forward(self, seed: int) -> Any:
        rng = np.random.default_rng([seed, fsdpc.rank()])
        x = fsdpc.tensor(rng.standard_normal((12, 8)).astype(np.float32))
        y = fsdpc.tensor(rng.integers(0, 64, 12))
        weight = self.head.weight
        return fsdpc.functional.linear_cross_entropy(self.body(x), weight, y, chunk_rows=4)


def loans(_: str) -> list[tuple[int, str]]:
    """What two forwards keep, and a digest of the gradients: with loans, and without."""
    found = []
    for borrows in (True, False):
        fsdpc.manual_seed(3)
        model = fsdpc.fully_shard(Scorer())
        if not borrows:
            model.head.weight.register_hook(lambda gradient: None)
        before = fsdpc.memory_stats()["activation_bytes"]
        losses = [model(seed) for seed in range(2)]
        kept = fsdpc.memory_stats()["activation_bytes"] - before
        for loss in (losses[1], losses[0], model(2)):  # the first moves, the last stays
            loss.backward()
        digest = hashlib.sha256()
        for p in model.parameters():
            digest.update(fsdpc.full_grad(p).numpy().tobytes())
        found.append((kept, digest.hexdigest()))
        del losses, loss
    return found


def work(fn: Callable[[str], Any], device: str, argument: str) -> Any:
    """Be one rank."""
    fsdpc.set_default_device(device)
    fsdpc.init(deterministic=fn is deterministic)
    return fn(argument)


def main() -> None:
    """Launch the ranks."""
    what, device, ranks, *rest = sys.argv[1:]
    fn = globals()[what]
    print(json.dumps(fsdpc.launch(work, int(ranks), fn, device, *(rest or [""]), timeout=200)))


if __name__ == "__main__":
    main()
