"""Files whose chunks are small, and a small model that lies in several; trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import fsdpc
from fsdpc import _core, nn
from fsdpc.sharding import offload

BF16 = fsdpc.bfloat16
STEPS, WIDTH = 4, 96
CHUNK = 4096  # elements, the least there is

_kept: list[_core.Tier] = []  # policies find them as long as they live


def on_disk(folder: Path, *classes: str, fraction: float = 1.0) -> Any:
    """Put these classes on the disk, in chunks of CHUNK elements; None if there are none."""
    if not classes:
        return None
    key = os.path.realpath(folder), fsdpc.rank()
    if key not in offload._tiers:
        _kept.append(_core.Tier(*key, CHUNK))
        offload._tiers[key] = _kept[-1]
    where = dict.fromkeys(classes, "disk")
    return fsdpc.OffloadPolicy(**where, path=folder, fraction=fraction)


class Block(nn.Module):
    """A layer, one that some calls use, and parameters of other dtypes: groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        values = np.linspace(0.5, 1.5, 90 * WIDTH, dtype=np.float32)
        self.narrow = nn.Parameter(fsdpc.tensor(values).reshape(90, WIDTH).to(BF16))

    def forward(self, x: Any, spare: bool) -> Any:
        x = self.frozen(self.layer(x)).tanh()
        x = x + (self.spare(x) if spare else 0)
        return x * self.narrow.to(x.dtype).mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 60)

    def forward(self, x: Any, spare: bool) -> Any:
        for block in self.layers:
            x = block(x, spare)
        return (self.head(x) ** 2).mean()


def build(param_dtype: Any = None, **options: Any) -> Any:
    fsdpc.manual_seed(11)
    model = Net()
    options["mp_policy"] = fsdpc.MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in model.layers:
        fsdpc.fully_shard(block, **options)
    return fsdpc.fully_shard(model, **options)


def batch(step: int, micro: int) -> Any:
    rng = np.random.default_rng([step, micro, fsdpc.rank()])
    return fsdpc.tensor(rng.standard_normal((3, WIDTH)).astype(np.float32))


OPTIMIZERS: dict[str, Any] = {
    "AdamW": (fsdpc.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (fsdpc.optim.AdamW, {"amsgrad": True}),
    "bf16 states": (fsdpc.optim.AdamW, {"state_dtype": BF16, "seed": 3}),
    "SGD": (fsdpc.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Lion": (fsdpc.optim.Lion, {}),
}


def optimizer_of(model: Any, kind: str) -> Any:
    make, options = OPTIMIZERS[kind]
    return make(model.named_parameters(), lr=1e-2, **options)


def train(model: Any, optimizer: Any, steps: range = range(STEPS)) -> list[float]:
    """Two micro-steps each, the spare layers used by one rank at every other step; clipped."""
    seen = []
    for step in steps:
        spare = step % 2 == 1 and fsdpc.rank() == fsdpc.world_size() - 1
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1 or step > 1)
            loss = model(batch(step, micro), spare)
            loss.backward()
            seen.append(float(loss))
        seen.append(float(fsdpc.clip_grad_norm_(model, 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Values and states by name, as bytes; collective."""
    found = {n: fsdpc.full_tensor(p).numpy().tobytes() for n, p in model.named_parameters()}
    for name, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"{key} {name}"] = value if key == "step" else value.numpy().tobytes()
    return found
