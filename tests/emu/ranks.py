"""What ranks on the emulated GPU (or the CPU) do; prints what each returned as JSON.

    ranks.py WHAT DEVICE RANKS [ARGUMENT]
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from training import MAX_NORM, MODELS, build

import fsdpc

STEPS, MICRO_STEPS = 2, 2
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


def train(model: Any, name: str, micro_steps: int = MICRO_STEPS) -> Result:
    """Train on batches of (step, micro-step, rank); losses, norms, a digest of the parameters."""
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(micro_steps):
            number = micro * fsdpc.world_size() + fsdpc.rank()
            loss = model(*MODELS[name][1](np.random.default_rng([step, number])))
            (loss / micro_steps).backward()
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


def deterministic(_: str) -> list[Any]:
    """Four contributions a step, however many ranks give them."""
    model = build("perceptron")
    return [*train(model, "perceptron", 4 // fsdpc.world_size())[1:]]


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
            fsdpc.broadcast(rank, root=1), fsdpc.all_reduce(np.arange(3) * rank).tolist()]


class Deep(fsdpc.nn.Module):
    """Blocks whose fulls are worth taking turns for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = fsdpc.nn.ModuleList([fsdpc.nn.Linear(768, 768) for _ in range(4)])
        self.head = fsdpc.nn.Linear(768, 4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return (self.head(x) * self.head(x)).mean()


def memory(_: str) -> dict[str, Any]:
    """Bytes of fulls as planned and as held, and a digest of the weights, by strategy."""
    results = {}
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        fsdpc.manual_seed(0)
        model = Deep()
        before = fsdpc.memory_stats()["wire_bytes"]
        planned = fsdpc.memory_plan(model, fsdpc.world_size(), strategy=strategy,
                                    plan={"layers.*": {}})
        for module in (*model.layers, model):
            fsdpc.fully_shard(module, strategy=strategy)
        optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            model(fsdpc.tensor(np.full((2, 768), step + 1, np.float32))).backward()
            optimizer.step()
            optimizer.zero_grad()
        held = fsdpc.memory_stats()["wire_bytes"] - before
        digest = hashlib.sha256()
        for p in model.parameters():
            digest.update(fsdpc.full_tensor(p).numpy().tobytes())
        found = fsdpc.memory_plan(model, strategy=strategy)
        results[strategy] = [held, found.wire, planned.wire, digest.hexdigest()]
        del model, optimizer
    return results


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
