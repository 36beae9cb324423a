"""Trains small models on the emulated GPU; prints, as JSON, what the host did in steady steps.

For each model, and dtype or norm: waits for the device, queries of events, CUDA's allocations and
fsdpc's ``system_allocs`` over the steps; waits for reading one value behind them; and how often
``system_allocs`` had grown by then.
"""

from __future__ import annotations

import ctypes
import json
import os

import numpy as np
from training import MAX_NORM, MODELS, build

import fsdpc

WARM_UP, STEPS = 3, 3  # the first step records the schedule, the second makes what it gathers ahead


def counters() -> dict[str, int]:
    """What was counted so far."""
    plugin = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"])
    counts = {"system_allocs": fsdpc.memory_stats()["system_allocs"]}
    for name in ("waits", "queries", "allocations"):
        function = getattr(plugin, f"emu_{name}")
        function.restype = ctypes.c_ulonglong
        counts[name] = function()
    return counts


def steady(name: str, dtype: str, p: float = 2) -> dict[str, int]:
    """Train one model, clipped by a p-norm; return what the steps behind the first ones counted."""
    model = build(name, dtype)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    batch = tuple(fsdpc.tensor(array) for array in MODELS[name][1](np.random.default_rng(0)))
    before = {}
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before = counters()
        loss = model(*batch)
        loss.backward()
        norm = fsdpc.clip_grad_norm_(model, MAX_NORM / 16, p)
        optimizer.step()
        optimizer.zero_grad()
    after = counters()
    float(loss)
    read = counters()["waits"] - after["waits"]
    assert float(norm) > MAX_NORM / 16
    return {**{key: after[key] - before[key] for key in after}, "read": read,
            "made": after["system_allocs"]}


def main() -> None:
    """Train every model in both dtypes, and one by other norms."""
    fsdpc.set_default_device("cuda")
    counted = {f"{name} {dtype}": steady(name, dtype) for name in ("llama", "perceptron")
               for dtype in ("fp32", "bf16")}
    for p in (1, np.inf):
        counted[f"perceptron {p}-norm"] = steady("perceptron", "bf16", p)
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
