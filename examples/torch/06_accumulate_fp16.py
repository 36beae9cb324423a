"""fp16 with GradScaler and gradient accumulation: micro-steps reduce once, overflows skip a step.

fsdpc run --ranks 2 examples/torch/06_accumulate_fp16.py [STEPS]
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn

import fsdpc
from fsdpc.torch import MixedPrecisionPolicy, fully_shard, optim

STEPS = int(sys.argv[1]) if sys.argv[1:] else 21
MICRO = 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
policy = MixedPrecisionPolicy(torch.float16, torch.float32, output_dtype=torch.float32)
model = fully_shard(model, mp_policy=policy)
optimizer = optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # too large at first: it adapts
generator = torch.Generator().manual_seed(fsdpc.rank())
for step in range(STEPS):
    for micro in range(MICRO):
        model.set_requires_gradient_sync(micro == MICRO - 1)
        x = torch.randn(16, 32, generator=generator)
        loss = (model(x) - x).square().mean()
        scaler.scale(loss / MICRO).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f} scale {scaler.get_scale():g}")
