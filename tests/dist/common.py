"""A small LLaMA trained sharded, and the same training spelled out in one process."""

from __future__ import annotations

from typing import Any

import numpy as np

import fsdpc
from fsdpc.models import Llama, ModelConfig

CONFIG = ModelConfig(vocab_size=61, dim=48, layers=3, heads=3, inner=80)
LR, CLIP = 1e-2, 1.0


def batch(step: int, rank: int, micro: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The words of one rank's micro-step."""
    rng = np.random.default_rng([step, rank, micro])
    ids = rng.integers(0, CONFIG.vocab_size, (2, 18))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def build(sharded: bool, param_dtype: Any = None, reduce_dtype: Any = None, **options: Any) -> Any:
    """The model from seed 7; sharded by blocks, or as it is."""
    fsdpc.manual_seed(7)
    if not sharded:
        return Llama(CONFIG)
    with fsdpc.deferred_init():
        model = Llama(CONFIG)
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in model.blocks():
        fsdpc.fully_shard(block, mp_policy=policy, **options)
    return fsdpc.fully_shard(model, mp_policy=policy, **options)


def train(model: Any, steps: int, accumulate: int = 1) -> tuple[list[float], list[float]]:
    """Losses of this rank and global norms of every step."""
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = model(*batch(step, fsdpc.rank(), micro))
            loss.backward()
            losses.append(float(loss))
        norms.append(float(fsdpc.clip_grad_norm_(model, CLIP)))
        optimizer.step()
    return losses, norms


def parameters(model: Any) -> dict[str, np.ndarray]:
    """Full values by name; collective if sharded."""
    return {name: fsdpc.full_tensor(p).numpy().copy() for name, p in model.named_parameters()}


def tree_sum(values: list[np.ndarray]) -> np.ndarray:
    """((0 + 1) + (2 + 3)) + ..., an odd one out passed up."""
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


def train_in_one_process(
    world: int, steps: int, accumulate: int = 1
) -> tuple[Any, list[list[float]]]:
    """The unsharded fp32 model fed every rank's batches; returns it and losses[rank]."""
    model = build(sharded=False)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=LR)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(steps):
        total: dict[str, np.ndarray] = {}
        for micro in range(accumulate):
            grads: list[dict[str, np.ndarray]] = []
            for rank in range(world):
                model.zero_grad()
                loss = model(*batch(step, rank, micro))
                loss.backward()
                losses[rank].append(float(loss))
                grads.append({n: p.grad.numpy().copy() for n, p in model.named_parameters()})
            for name in grads[0]:
                mean = tree_sum([g[name] for g in grads]) * np.float32(1 / world)
                total[name] = total[name] + mean if name in total else mean
        for name, p in model.named_parameters():
            p.grad = fsdpc.from_numpy(total[name])
        fsdpc.clip_grad_norm_(model, CLIP)
        optimizer.step()
    return model, losses


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Every value has the same bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name].view(np.uint32), b[name].view(np.uint32)), name
