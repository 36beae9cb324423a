"""An FSDP2 training loop as in the tutorials, with one import changed.

fsdpc run --ranks 2 examples/torch/01_fsdp2_loop.py [STEPS]
torchrun --nproc_per_node 2 examples/torch/01_fsdp2_loop.py
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard  # was: torch.distributed.fsdp

STEPS = int(sys.argv[1]) if sys.argv[1:] else 30

torch.manual_seed(0)
model = nn.Sequential(
    *[nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)],
    nn.Linear(64, 16),
)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
generator = torch.Generator().manual_seed(fsdpc.rank())
for step in range(STEPS):
    x = torch.randn(8, 12, 64, generator=generator)
    loss = nn.functional.mse_loss(model(x).float(), x[..., :16])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f} norm {norm.item():.3f}")

state = model.state_dict()  # DTensors; full_tensor() gathers one
print(f"{len(state)} tensors, {sum(v.numel() for v in state.values()):,} elements")
