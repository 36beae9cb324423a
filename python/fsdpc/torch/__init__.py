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

import fsdpc.torch._version  # noqa: F401, before anything that an old torch lacks
from fsdpc.fsdp_module import UnshardHandle, register_fsdp_forward_method
from fsdpc.torch import _checkpoint as _checkpoint  # lets fsdpc.checkpoint know torch
from fsdpc.torch import fully_sharded_data_parallel, optim, sharded_grad_scaler, wrap
from fsdpc.torch._module import FSDPModule, fully_shard
from fsdpc.torch.clip import clip_grad_norm_
from fsdpc.torch.ddp import DistributedDataParallel
from fsdpc.torch.fsdp1 import FullyShardedDataParallel, ShardingStrategy
from fsdpc.torch.fsdp1_options import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdpc.torch.kernels import KernelLinear, use_kernels
from fsdpc.torch.optim_state import get_optimizer_state_dict, set_optimizer_state_dict
from fsdpc.torch.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdpc.torch.state_dict import (
    full_grad,
    get_model_state_dict,
    set_model_state_dict,
    summon_full_params,
)
from fsdpc.torch.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

__all__ = [
    "BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "DistributedDataParallel",
    "FSDPModule", "FullOptimStateDictConfig", "FullStateDictConfig", "FullyShardedDataParallel",
    "KernelLinear", "MixedPrecision", "MixedPrecisionPolicy", "OffloadPolicy",
    "OptimStateDictConfig", "OptimStateKeyType", "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig", "ShardingStrategy", "StateDictConfig", "StateDictSettings",
    "StateDictType", "UnshardHandle", "clip_grad_norm_", "full_grad", "fully_shard",
    "fully_sharded_data_parallel", "get_model_state_dict", "get_optimizer_state_dict", "optim",
    "register_fsdp_forward_method", "set_model_state_dict", "set_optimizer_state_dict",
    "sharded_grad_scaler", "size_based_auto_wrap_policy", "summon_full_params",
    "transformer_auto_wrap_policy", "use_kernels", "wrap",
]  # fmt: skip
