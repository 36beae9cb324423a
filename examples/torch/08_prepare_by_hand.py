"""A typical Accelerate loop, with `prepare` and `accumulate` replaced by a few lines here.

fsdpc run --ranks 2 examples/torch/08_prepare_by_hand.py [STEPS]
torchrun --nproc_per_node 2 examples/torch/08_prepare_by_hand.py

The optimizer is created before sharding, as in such scripts; `prepare` creates it again
for the sharded parameters, with its options.
"""

import sys
from typing import Any

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsdpc
from fsdpc.torch import fully_shard

STEPS = int(sys.argv[1]) if sys.argv[1:] else 30
ACCUMULATE = 2


def prepare(
    model: Any, optimizer: Any, loader: DataLoader[Any]
) -> tuple[Any, Any, DataLoader[Any]]:
    """Shard the model by layers; give the optimizer its parameters and each rank its samples."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    sharded = dict(model.named_parameters())
    for group in groups:
        group["params"] = [sharded[name] for name in group["params"]]
    optimizer = type(optimizer)(groups)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, fsdpc.world_size(), fsdpc.rank(), shuffle=True
    )
    return model, optimizer, DataLoader(loader.dataset, loader.batch_size, sampler=sampler)


torch.manual_seed(0)
inputs = torch.randn(512, 32)
targets = inputs @ torch.randn(32, 8)
model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)])
model.append(nn.Sequential(nn.Linear(32, 8)))
decay = [p for p in model.parameters() if p.dim() >= 2]
plain = [p for p in model.parameters() if p.dim() < 2]
optimizer: Any = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
model, optimizer, loader = prepare(model, optimizer, loader)

batches: Any = iter(())
for step in range(STEPS):
    for micro in range(ACCUMULATE):
        model.set_requires_gradient_sync(micro == ACCUMULATE - 1)  # accelerator.accumulate(model)
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        (loss / ACCUMULATE).backward()  # accelerator.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = fsdpc.all_reduce(loss.item(), "mean")  # accelerator.gather(loss).mean()
    if step % 10 == 0:
        print(f"step {step}: loss {mean:.4f}")
print(f"weight decay of the groups: {[group['weight_decay'] for group in optimizer.param_groups]}")
