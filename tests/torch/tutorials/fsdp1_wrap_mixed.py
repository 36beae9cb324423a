"""A transformer: policy by layer, mixed precision, clipping, accumulation without communication."""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

bfSixteen = MixedPrecision(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.bfloat16,
    buffer_dtype=torch.bfloat16,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(5, 16)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x)))


def fsdp_main(rank: int, world_size: int, folder: str) -> list[float]:
    torch.manual_seed(0)
    t5_auto_wrap_policy = functools.partial(
        transformer_auto_wrap_policy,
        transformer_layer_cls={
            nn.TransformerEncoderLayer,
        },
    )
    model = Model()
    model = FSDP(
        model,
        auto_wrap_policy=t5_auto_wrap_policy,
        mixed_precision=bfSixteen,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        limit_all_gathers=True,
        forward_prefetch=True,
        sync_module_states=True,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    torch.manual_seed(10 + rank)
    losses = []
    for _ in range(4):
        batches = [torch.randn(4, 6, 5) for _ in range(2)]
        optimizer.zero_grad()
        with model.no_sync():
            (model(batches[0]).float() ** 2).mean().backward()
        loss = (model(batches[1]).float() ** 2).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        losses.append(float(model.clip_grad_norm_(1.0)))
        optimizer.step()
    with FSDP.summon_full_params(model, writeback=False):
        losses.append(float(model.head.weight.detach().norm()))
    return losses
