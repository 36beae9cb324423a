"""What ranks do with masters and states in memory of the host; prints what each returned as JSON.

    offloads.py WHAT RANKS [ARGUMENT]
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ranks import CATEGORIES, CLIPPED
from training import MAX_NORM, MODELS, build

import fsdpc
from fsdpc import checkpoint, optim
from fsdpc.sharding import offload

BF16 = fsdpc.bfloat16
CLASSES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "states": ("optimizer",),
    "masters": ("masters",),
    "both": ("masters", "optimizer"),
    "all": ("masters", "optimizer", "gradients"),
    "params": ("params",),
    "everything": ("masters", "optimizer", "gradients", "params"),
}
#: The CPU steps these.
STEPPED = ("both", "all", "everything")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (optim.AdamW, {"amsgrad": True}),
    "bf16 states": (optim.AdamW, {"state_dtype": BF16, "seed": 3}),
    "SGD": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Lion": (optim.Lion, {}),
}


def names() -> list[str]:
    """Of CLASSES, those that ranks have who shard among so many."""
    return [name for name, of in CLASSES.items() if "params" not in of or fsdpc.world_size() > 1]


def policy(name: str) -> Any:
    return fsdpc.OffloadPolicy(**dict.fromkeys(CLASSES[name], "host"))


def made(name: str, dtype: str = "fp32", kind: str = "AdamW", **options: Any) -> tuple[Any, Any]:
    model = build("perceptron", dtype, offload_policy=policy(name), **options)
    make, hypers = OPTIMIZERS[kind]
    return model, make(model.named_parameters(), lr=1e-2, **hypers)


def batch(step: int, micro: int) -> Any:
    return MODELS["perceptron"][1](np.random.default_rng([step, micro, fsdpc.rank()]))


def train(model: Any, optimizer: Any, *steps: int) -> list[float]:
    """Micro-steps that reduce, or the last one alone; a parameter that does not train by turns."""
    seen = []
    frozen = model.hidden[1].wide.bias
    for step in range(*steps):
        frozen.requires_grad_(step % 3 != 1)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1 or step > 1)
            loss = model(*batch(step, micro))
            loss.backward()
            seen.append(float(loss))
        seen.append(float(fsdpc.clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Values and states by name, as bytes; collective."""
    found = {n: fsdpc.full_tensor(p).numpy().tobytes().hex() for n, p in model.named_parameters()}
    for name, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"{key} {name}"] = value if key == "step" else value.numpy().tobytes().hex()
    return found


def differing(*found: Any) -> list[Any]:
    """Which of these are not as the first."""
    return [i for i, each in enumerate(found) if each != found[0]]


def bits(kinds: str) -> dict[str, Any]:
    """Which places give other bits than the device alone; masters and states held by each."""
    result: dict[str, Any] = {}
    for turn, kind in enumerate(kinds.split(",")):
        found, held = [], {}
        for i, name in enumerate(names()):
            strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
            strategies = strategies[: 2 if "params" in CLASSES[name] else 3]
            gc.collect()
            before = fsdpc.memory_stats()
            model, optimizer = made(name, ("fp32", "bf16")[turn % 2], kind,
                                    strategy=strategies[(turn + i) % len(strategies)])
            found.append((train(model, optimizer, 4), everything(model, optimizer)))
            after = fsdpc.memory_stats()
            held[name] = {key: after[f"{key}_bytes"] - before[f"{key}_bytes"]
                          for key in ("master", "state", "grad", "unsharded", "pinned")}
            del model, optimizer
        result[kind] = [differing(*found), held]
    return result


def between(argument: str) -> list[Any]:
    """Rows that are written between steps, by every way to reach them; saved and resumed."""
    path, _, words = argument.rpartition(":")
    places = words.split(",")
    found = []
    for number, name in enumerate(places):
        model, optimizer = made(name)
        train(model, optimizer, 2)
        named = dict(model.named_parameters())
        first = named["hidden.0.wide.weight"]
        seen = [{k: v if k == "step" else v.numpy().tobytes().hex()
                 for k, v in optimizer.state(first).items()}]
        optimizer.set_step_count(named["hidden.1.wide.weight"], 0)
        train(model, optimizer, 2, 3)
        local = first.local
        local.copy_(local * 0.5)  # and held from here on
        train(model, optimizer, 3, 4)
        checkpoint.save(f"{path}/{number}", {"model": model, "optimizer": optimizer})
        train(model, optimizer, 4, 5)
        local.copy_(local + 0.25)
        train(model, optimizer, 5, 6)
        seen.append(everything(model, optimizer))
        found.append(seen)
        del model, optimizer
    files = []
    if fsdpc.rank() == 0:
        files = [{p.name: p.read_bytes().hex() for p in Path(path, str(i)).glob("*.safetensors")}
                 for i in range(len(places))]
    resumed = []
    for number, name in enumerate(reversed(places)):
        model, optimizer = made(name)
        if number % 2:
            train(model, optimizer, 1)
        checkpoint.load(f"{path}/{number}", {"model": model, "optimizer": optimizer})
        resumed.append((train(model, optimizer, 4, 6), everything(model, optimizer)))
    return [differing(*found), differing(*files), differing(*resumed), len(files)]


@contextmanager
def stalled() -> Iterator[Any]:
    """The device stands still; yields what counts the host's waits."""
    plugin = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"])
    fsdpc.distributed.barrier()
    plugin.emu_stall(1)
    try:
        yield plugin.emu_waits
    finally:
        plugin.emu_stall(0)


def ahead(_: str) -> dict[str, Any]:
    """Waits from a forward to the clipping of its gradients; whether the bits are those of none."""
    result = {}
    found = []
    for name in ("nothing", *STEPPED):
        model, optimizer = made(name)
        batches = [tuple(fsdpc.tensor(array) for array in batch(step, 0)) for step in range(3)]
        waits = 0
        for step in range(3):
            gc.collect()
            with stalled() if step == 2 else stalled_never() as count:
                before = count()
                model(*batches[step]).backward()
                norm = fsdpc.clip_grad_norm_(model, CLIPPED, np.inf)
                waits = count() - before
            optimizer.step()
            optimizer.zero_grad()
        found.append((float(norm), everything(model, optimizer)))
        result[name] = [waits, float(norm) > CLIPPED]
    return {**result, "differing": differing(*found)}


@contextmanager
def stalled_never() -> Iterator[Any]:
    """The device goes on."""
    yield lambda: 0


def planned(_: str) -> list[Any]:
    """What was held at most and what was planned, of a sharded model and of one to be."""
    result = []
    kinds = (*CATEGORIES, "pinned")
    for name in names():
        gc.collect()
        before = fsdpc.memory_stats()
        fsdpc.reset_peak_memory_stats()
        model, optimizer = made(name, "bf16")
        for _ in range(2):
            model(*batch(0, 0)).backward()
            fsdpc.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        after = fsdpc.memory_stats()
        here = fsdpc.memory_plan(model)
        there = fsdpc.memory_plan(
            MODELS["perceptron"][0](), offload_policy=policy(name),
            mp_policy=fsdpc.MixedPrecisionPolicy(param_dtype=BF16),
        )
        result.append([
            {k: after[f"{k}_peak_bytes"] - before[f"{k}_bytes"] for k in kinds},
            {k: getattr(here, k) for k in kinds}, here == there, str(here.for_device("cpu")),
        ])
        del model, optimizer
    return result


class Deep(fsdpc.nn.Module):
    """Blocks whose activations have several KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = fsdpc.nn.ModuleList(
            fsdpc.nn.Sequential(fsdpc.nn.RMSNorm(48), fsdpc.nn.Linear(48, 96), fsdpc.nn.GELU(),
                                fsdpc.nn.Dropout(0.2), fsdpc.nn.Linear(96, 48))
            for _ in range(5)
        )

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return (x * x).mean()


def activations(_: str) -> list[Any]:
    """Losses, gradients and peaks with activations on the host, and without; the plan's peaks."""
    found, peaks = [], []
    for recomputes in (False, True):
        for where in (None, fsdpc.OffloadPolicy(activations="host")):
            gc.collect()
            before = fsdpc.memory_stats()
            fsdpc.manual_seed(5)
            model = Deep()
            if recomputes:
                fsdpc.checkpoint_activations(model.blocks)
            for unit in (*model.blocks, model):
                fsdpc.fully_shard(unit, offload_policy=where)
            rng = np.random.default_rng(fsdpc.rank())
            seen = []
            fsdpc.manual_seed(6)
            for step in range(3):
                x = fsdpc.tensor(rng.standard_normal((64, 48)).astype(np.float32))
                fsdpc.reset_peak_memory_stats()
                losses = [model(x) for _ in range(1 + step % 2)]
                for loss in losses:
                    loss.backward()
                    seen.append(float(loss))
                del loss, losses
                if step == 0:
                    after = fsdpc.memory_stats()
            found.append([seen, [p.grad.numpy().tobytes().hex() for p in model.parameters()]])
            plan = fsdpc.memory_plan(model, batch_shape=(64, 48))
            peaks.append([after["pinned_bytes"] - before["pinned_bytes"], plan.pinned,
                          after["activation_peak_bytes"] - before["activation_bytes"],
                          plan.activation])
            del model, unit, x
    return [differing(*found[:2]), differing(*found[2:]), peaks]


def averages(_: str) -> list[Any]:
    """Which places give other averages, losses inside swap() or bits after it; held as planned?"""
    found, held = [], []
    for name in names():
        gc.collect()
        before = fsdpc.memory_stats()
        model, optimizer = made(name, "bf16")
        ema = fsdpc.EMA(model, 0.8)
        seen: list[Any] = []
        for step in range(4):
            seen.append(train(model, optimizer, step, step + 1))
            ema.update()
            with ema.swap():
                seen.append(float(model(*batch(9, 0))))
        state = ema.state_dict()["averages"]
        seen.append({name: value.numpy().tobytes().hex() for name, value in state.items()})
        found.append((seen, everything(model, optimizer)))
        after, plan = fsdpc.memory_stats(), fsdpc.memory_plan(model, ema=True)
        held += [after[f"{kind}_bytes"] - before[f"{kind}_bytes"] == getattr(plan, kind)
                 for kind in ("master", "state", "pinned")]
        del model, optimizer, ema
    return [differing(*found), all(held)]


def refused(folder: str) -> list[str]:
    """The errors of what cannot be."""
    said = []

    def attempt(call: Any) -> None:
        try:
            call()
        except (NotImplementedError, fsdpc.MismatchError) as error:
            said.append(f"{type(error).__name__}: {error}")

    def shard(strategy: str = "FULL_SHARD", **classes: str) -> None:
        fsdpc.fully_shard(fsdpc.nn.Linear(3, 3), strategy=strategy,
                          offload_policy=fsdpc.OffloadPolicy(**classes))

    attempt(lambda: shard(optimizer="disk", path=folder))
    attempt(lambda: shard("NO_SHARD", params="host"))
    attempt(lambda: shard(masters="host", gradients="disk", path=folder))
    attempt(lambda: shard(masters=("host", "device")[fsdpc.rank()]))
    model, optimizer = made("both")
    train(model, optimizer, 2)
    attempt(lambda: fsdpc.graph_step(model, optimizer).__enter__())
    units = [fsdpc.fully_shard(fsdpc.nn.Linear(3, 3), offload_policy=on_host) for on_host in (
        fsdpc.OffloadPolicy(activations="host"), None)]  # fmt: skip
    deep = fsdpc.fully_shard(fsdpc.nn.Sequential(*units))
    attempt(lambda: fsdpc.graph_step(deep, optimizer))
    attempt(lambda: shard(activations="disk", path=folder))
    return [*said, offload.words(policy("both"))]


def work(fn: Any, argument: str) -> Any:
    """Be one rank."""
    fsdpc.set_default_device("cuda")
    fsdpc.init()
    return fn(argument)


def main() -> None:
    """Launch the ranks."""
    what, ranks, *rest = sys.argv[1:]
    fn = globals()[what]
    print(json.dumps(fsdpc.launch(work, int(ranks), fn, *(rest or [""]), timeout=200)))


if __name__ == "__main__":
    main()
