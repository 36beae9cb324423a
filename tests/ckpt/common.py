"""Small models, every way to shard them, and a hold on calls to the file system."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fsdpc
from fsdpc import nn
from fsdpc.checkpoint import saving
from fsdpc.models import Llama, ModelConfig

CONFIG = ModelConfig(vocab_size=61, dim=48, layers=2, heads=3, inner=80)


class Odd(nn.Module):
    """Parameters of every kind: uneven, few rows, 1-D, tied, frozen, bf16; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7)
        self.single = nn.Linear(7, 1)
        self.narrow = nn.Parameter(fsdpc.tensor(np.arange(33, dtype=np.float32)).to(fsdpc.bfloat16))
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.wide.weight
        self.frozen = nn.Parameter(fsdpc.tensor(np.ones((3, 4), np.float32)), requires_grad=False)
        self.register_buffer("table", fsdpc.tensor(np.arange(6, dtype=np.int64)))

    def forward(self, x: Any) -> Any:
        return self.single(self.wide(x) + self.tied(x)).mean() + self.narrow.float().mean()


STRATEGIES = ["plain", *(s.name for s in fsdpc.ShardingStrategy)]


def options_of(how: str) -> dict[str, Any]:
    """Arguments of fully_shard for a strategy at this number of ranks."""
    if not how.startswith("HYBRID"):
        return {"strategy": how}
    world = fsdpc.world_size()
    rows = 2 if world % 2 == 0 else 1
    return {"strategy": how, "mesh": fsdpc.init_device_mesh("cpu", (rows, world // rows))}


def sharded(model: Any, how: str) -> Any:
    """The model as one unit, or as it is."""
    return model if how == "plain" else fsdpc.fully_shard(model, **options_of(how))


def by_blocks(model: Any, **options: Any) -> Any:
    for block in model.blocks():
        fsdpc.fully_shard(block, **options)
    return fsdpc.fully_shard(model, **options)


def llama(how: str = "FULL_SHARD", seed: int = 7) -> Llama:
    """The model by blocks, or as it is."""
    fsdpc.manual_seed(seed)
    model = Llama(CONFIG)
    return model if how == "plain" else by_blocks(model, **options_of(how))


def values(model: Any) -> dict[str, bytes]:
    """Full values by name, on all ranks before any goes on; collective."""
    found = {name: t.numpy().tobytes() for name, t in model.state_dict().items()}
    fsdpc.barrier()  # rows of a mesh gather apart, and a rank that ends counts as dead there
    return found


@contextlib.contextmanager
def hooked(hook: Callable[[str, str], Any] | None) -> Iterator[None]:
    """Let a function see every call to the file system of saves and loads."""
    before, saving._hook = saving._hook, hook
    try:
        yield
    finally:
        saving._hook = before
