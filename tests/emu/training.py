"""Trains small models on the device that argv[1] names; prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import fsdpc
from fsdpc import functional as F
from fsdpc import lora, nn
from fsdpc.models import Llama
from fsdpc.models.config import ModelConfig

ON_GPU = os.environ.get("FSDPC_TEST_GPU") == "1"  # this machine's, in the emulated one's place
STEPS = 5
MAX_NORM = 0.3  # below the norms of all first steps
WORDS = 64
Batch = tuple[np.ndarray, np.ndarray]


class Hidden(nn.Module):
    """Two linear layers with gelu between, which goes with the first forward, the second back."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Any) -> Any:
        return self.narrow(F.linear_gelu(x, self.wide.weight, self.wide.bias))


class Perceptron(nn.Module):
    """Blocks of x + hidden(layer_norm(x)), and the squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(24) for _ in range(3)])
        self.hidden = nn.ModuleList([Hidden() for _ in range(3)])

    def forward(self, x: Any, y: Any) -> Any:
        h = fsdpc.tensor(x)
        for norm, hidden in zip(self.norms, self.hidden, strict=True):
            h = h.to(norm.weight.dtype)
            h = h + hidden(norm(h))
        error = h.float() - fsdpc.tensor(y)
        return (error * error).mean()

    def blocks(self) -> list[nn.Module]:
        return list(self.hidden)


class Weighted(nn.Module):
    """A sum of weights times given numbers: gradients have the same bits wherever it runs."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        values = np.linspace(-1, 1, 1000, dtype=np.float32)
        self.w = nn.Parameter(fsdpc.tensor(values.reshape(shape or 1000)))

    def forward(self, x: Any, y: Any) -> Any:
        return (self.w * fsdpc.tensor(x.reshape(self.w.shape)).to(self.w.dtype)).sum()

    def blocks(self) -> list[nn.Module]:
        return []


def llama() -> Llama:
    """Grouped queries, three units."""
    return Llama(ModelConfig(vocab_size=WORDS, dim=32, layers=2, heads=4, kv_heads=2, inner=48,
                             max_seq=16))


def qlora() -> Llama:
    """The same, with quantised layers and adapters."""
    model = llama()
    nn.quantize_(model, "nf4")
    lora.apply(model, 4)
    for p in lora.parameters(model):
        if not p.detach().numpy().any():
            nn.init.normal_(p, 0, 0.1)  # so that all have gradients
    return model


def words(rng: np.random.Generator) -> Batch:
    """Two sequences, and what follows each of their words."""
    ids = rng.integers(0, WORDS, (2, 17))
    return ids[:, :-1], ids[:, 1:]


def rows(rng: np.random.Generator) -> Batch:
    """Rows of numbers to be mapped onto others."""
    return tuple(rng.standard_normal((16, 24), dtype=np.float32) for _ in range(2))


def numbers(rng: np.random.Generator) -> Batch:
    """What each weight is multiplied by."""
    return rng.standard_normal(1000, dtype=np.float32), np.empty(0, np.float32)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[np.random.Generator], Batch]]] = {
    "llama": (llama, words), "perceptron": (Perceptron, rows),
    "weighted": (Weighted, numbers),
    "coded": (partial(Weighted, 10, 100), numbers),  # with states of a byte per element
    "factored": (partial(Weighted, 10, 100), numbers),  # by Adafactor
    "qlora": (qlora, words),
    "muon": (llama, words), "muon-bf16": (llama, words),  # by Muon, with iterations in that dtype
}


def build(name: str, dtype: str = "fp32", **options: Any) -> Any:
    """One of the models, sharded by its blocks with these options of fully_shard."""
    fsdpc.manual_seed(0)
    model = MODELS[name][0]()
    policy = fsdpc.MixedPrecisionPolicy(param_dtype=None if dtype == "fp32" else fsdpc.bfloat16)
    for module in (*model.blocks(), model):
        fsdpc.fully_shard(module, mp_policy=policy, **options)
    return model


def train(name: str, dtype: str) -> dict[str, Any]:
    """Train one model; return losses, norms and the parameters' bytes."""
    model = build(name, dtype)
    # Steps so small that they do not amplify what a CPU's kernels round otherwise than another's.
    states = fsdpc.optim.Int8(0) if name == "coded" else None
    if name.startswith("muon"):
        ns_dtype = "bfloat16" if name == "muon-bf16" else "float32"
        groups = fsdpc.optim.muon_groups(model, lr=3e-3)
        optimizer: Any = fsdpc.optim.Muon(groups, lr=3e-3, ns_dtype=ns_dtype)
    elif name == "factored":
        optimizer = fsdpc.optim.Adafactor(model.parameters(), lr=3e-3)
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = fsdpc.optim.AdamW(trained, lr=3e-3, state_dtype=states)
    batch = MODELS[name][1](np.random.default_rng(0))
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(*batch)
        loss.backward()
        norms.append(float(fsdpc.clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    values = [fsdpc.full_tensor(p).numpy().ravel() for p in model.parameters()
              if p.requires_grad]
    if name == "coded":
        held = fsdpc.optim.get_optimizer_state_dict(model, optimizer)
        fsdpc.optim.set_optimizer_state_dict(model, optimizer, held)  # encodes and decodes
        states = optimizer.state(model.w)
        values += [states[key].numpy().ravel() for key in ("exp_avg", "exp_avg_sq")]
    elif name == "factored":
        held = fsdpc.optim.get_optimizer_state_dict(model, optimizer)
        fsdpc.optim.set_optimizer_state_dict(model, optimizer, held)
        states = optimizer.state(model.w)
        values += [states[key].numpy().ravel() for key in ("row_var", "col_var")]
    return {"losses": losses, "norms": norms, "values": np.concatenate(values).tolist()}


def main() -> None:
    """Train every model in both dtypes."""
    fsdpc.set_default_device(sys.argv[1])
    results = {f"{name} {dtype}": train(name, dtype) for name in MODELS for dtype in
               ("fp32", "bf16")}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
