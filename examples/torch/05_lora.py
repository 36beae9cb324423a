"""LoRA by hand: a frozen bf16 base and small trainable fp32 matrices in the same units.

fsdpc run --ranks 2 examples/torch/05_lora.py [STEPS]
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn

import fsdpc
from fsdpc.torch import fully_shard, optim

STEPS = int(sys.argv[1]) if sys.argv[1:] else 40


class Lora(nn.Module):
    """A frozen linear layer with trainable matrices next to it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


torch.manual_seed(0)
model = nn.Sequential(Lora(nn.Linear(64, 64)), nn.GELU(), Lora(nn.Linear(64, 64)))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = optim.AdamW(trainable, lr=1e-2)
generator = torch.Generator().manual_seed(fsdpc.rank())
for step in range(STEPS):
    x = torch.randn(32, 64, generator=generator)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
print(f"{sum(p.numel() for p in trainable):,} elements trained on this rank")
