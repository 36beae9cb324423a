"""The torch front door: FSDP2's calls over the engine, for any ``torch.nn.Module``.

A script changes one import::

    from fsdpc.torch import MixedPrecisionPolicy, fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # or fsdpc.torch.optim.AdamW

Importing this module imports torch; nothing else of fsdpc does.
"""

from __future__ import annotations

from fsdpc.torch import optim
from fsdpc.torch._module import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdpc.torch.clip import clip_grad_norm_
from fsdpc.torch.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle",
    "clip_grad_norm_", "fully_shard", "optim", "register_fsdp_forward_method",
]  # fmt: skip
