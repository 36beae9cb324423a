"""The torch frontend: FSDP2's API on top of the engine, for any ``torch.nn.Module``.

A script changes one import::

    from fsdpc.torch import MixedPrecisionPolicy, fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # or fsdpc.torch.optim.AdamW

Importing this module imports torch, which fsdpc's native modules never do.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import fsdpc.torch._version  # noqa: F401, before imports that an old torch lacks
from fsdpc.sharding.compression import Compression, PowerSGD
from fsdpc.sharding.fsdp_module import UnshardHandle, register_fsdp_forward_method
from fsdpc.torch import _checkpoint as _checkpoint  # lets fsdpc.checkpoint know torch
from fsdpc.torch import backend, optim, sharded_grad_scaler, wrap
from fsdpc.torch._install import install, uninstall
from fsdpc.torch._module import FSDPModule, fully_shard, share_comm_ctx
from fsdpc.torch.clip import clip_grad_norm_
from fsdpc.torch.ddp import DistributedDataParallel
from fsdpc.torch.ema import EMA
from fsdpc.torch.fsdp1 import FullyShardedDataParallel, ShardingStrategy
from fsdpc.torch.kernels import KernelLinear, use_kernels
from fsdpc.torch.loss import linear_cross_entropy
from fsdpc.torch.optim_state import get_optimizer_state_dict, set_optimizer_state_dict
from fsdpc.torch.outer import Outer
from fsdpc.torch.plan import shard_by_plan
from fsdpc.torch.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdpc.torch.state_dict import (
    full_grad,
    get_model_state_dict,
    set_model_state_dict,
    summon_full_params,
)
from fsdpc.torch.tiles import tile_tokens

backend.register()

__all__ = [
    "BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "Compression", "DistributedDataParallel",
    "EMA", "FSDPModule", "FullOptimStateDictConfig", "FullStateDictConfig",
    "FullyShardedDataParallel", "KernelLinear", "MixedPrecision", "MixedPrecisionPolicy",
    "OffloadPolicy", "OptimStateDictConfig", "OptimStateKeyType", "Outer", "PowerSGD",
    "ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy", "StateDictConfig",
    "StateDictSettings", "StateDictType", "UnshardHandle", "clip_grad_norm_", "full_grad",
    "fully_shard", "fully_sharded_data_parallel", "get_model_state_dict",
    "get_optimizer_state_dict", "install", "linear_cross_entropy", "optim",
    "register_fsdp_forward_method", "set_model_state_dict", "set_optimizer_state_dict",
    "shard_by_plan", "share_comm_ctx", "sharded_grad_scaler", "size_based_auto_wrap_policy",
    "summon_full_params", "tile_tokens", "transformer_auto_wrap_policy", "uninstall", "use_kernels",
    "wrap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import FSDP1's options and policies from torch on first use."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    theirs = import_module("fsdpc.torch.fully_sharded_data_parallel")
    if name == "fully_sharded_data_parallel":
        return theirs
    return getattr(wrap if name.endswith("_policy") else theirs, name)
