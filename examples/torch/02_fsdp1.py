"""An FSDP1 script: the class, a wrap policy, a checkpoint on rank 0. One import line changed.

fsdpc run --ranks 2 examples/torch/02_fsdp1.py [STEPS]
"""

import functools
import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import torch
from torch import nn

import fsdpc
from fsdpc.torch import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fsdpc.torch import FullyShardedDataParallel as FSDP
from fsdpc.torch.wrap import transformer_auto_wrap_policy

STEPS = int(sys.argv[1]) if sys.argv[1:] else 30

torch.manual_seed(0)
encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = FSDP(
    nn.Sequential(nn.TransformerEncoder(encoder, 3), nn.Linear(64, 16)),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    ),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(fsdpc.rank())
for step in range(STEPS):
    x = torch.randn(8, 12, 64, generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), x[..., :16])
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

with FSDP.state_dict_type(
    model,
    StateDictType.FULL_STATE_DICT,
    FullStateDictConfig(rank0_only=True),
    FullOptimStateDictConfig(rank0_only=True),
):
    state = model.state_dict()
    states = FSDP.optim_state_dict(model, optimizer)
print(f"{len(state)} tensors, {len(states.get('state', {}))} optimizer states")
