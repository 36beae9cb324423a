"""Data parallel training like DDP: nothing sharded, gradients averaged, by changing one word.

    fsdpc run --ranks 2 examples/torch/03_no_shard.py [STEPS]

Prints what each strategy keeps on a rank, and shows that they compute the same.
"""

import gc
import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn

import fsdpc
from fsdpc.torch import fully_shard, optim

STEPS = int(sys.argv[1]) if sys.argv[1:] else 5


def train(strategy: str) -> None:
    """Run a few steps; print the loss and the memory in use."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    for layer in model:
        fully_shard(layer, strategy=strategy)
    fully_shard(model, strategy=strategy)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(fsdpc.rank())
    for _ in range(STEPS):
        x = torch.randn(16, 256, generator=generator)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = fsdpc.memory_stats()
    kinds = ("unsharded", "master", "grad", "reduce", "state")
    sizes = ", ".join(f"{k} {stats[f'{k}_bytes'] / 2**20:.1f}" for k in kinds)
    print(f"{strategy}: loss {loss.item():.6f}; MiB now: {sizes}")


for name in ("NO_SHARD", "SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD"):
    train(name)
    gc.collect()  # a sharded model and its hooks refer to each other
