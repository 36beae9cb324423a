"""Tensor parallelism over pairs of ranks, and sharding over the other dimension of the mesh.

fsdpc run --ranks 4 examples/torch/09_tensor_parallel.py [STEPS]
torchrun --nproc_per_node 4 examples/torch/09_tensor_parallel.py
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdpc.torch import clip_grad_norm_, fully_shard

STEPS = int(sys.argv[1]) if sys.argv[1:] else 30

if not dist.is_initialized():
    dist.init_process_group("fsdpc")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)
model = nn.Sequential(
    *[nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3)]
)
for block in model:
    # Ranks of "tp" divide the hidden units; those of "dp" divide what each of them has.
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # "tp" ranks share batches
for step in range(STEPS):
    x = torch.randn(16, 32, generator=generator)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)  # over both dimensions
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f} norm {norm.item():.3f}")

weight = model.get_parameter("0.0.weight")
if dist.get_rank() == 0 and isinstance(weight, DTensor):
    print(f"{tuple(weight.shape)} placed as {weight.placements}: {tuple(weight.to_local().shape)}")
dist.destroy_process_group()
