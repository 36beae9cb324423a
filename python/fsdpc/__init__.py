"""Fully sharded data parallel training: a C engine under thin Python.

The loop is PyTorch's::

    import fsdpc
    from fsdpc.models import Llama, preset

    model = Llama(preset("2M"))
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

Importing starts no thread, opens no socket and needs NumPy alone.
"""

from __future__ import annotations

from fsdpc import _ctrl_c  # isort: skip  # noqa: F401  # before the imports that take time

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdpc import _shard, _shown, cuda, distributed, functional, nn, optim
from fsdpc._core import (
    MismatchError,
    PeerError,
    Tensor,
    bfloat16,
    bool_,
    dtype,
    float16,
    float32,
    float64,
    int32,
    int64,
    is_grad_enabled,
    num_threads,
    reset_peak_memory_stats,
    set_num_threads,
    uint8,
)
from fsdpc._version import __version__ as __version__
from fsdpc.activation import checkpoint_activations
from fsdpc.clip import clip_grad_norm_, clip_grad_value_, grad_norms
from fsdpc.config import show_config
from fsdpc.creation import (
    arange,
    empty,
    empty_like,
    eye,
    from_dlpack,
    from_numpy,
    full,
    full_like,
    linspace,
    manual_seed,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randn,
    randn_like,
    tensor,
    zeros,
    zeros_like,
)
from fsdpc.device import get_default_device, set_default_device
from fsdpc.distributed import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    init,
    is_initialized,
    local_rank,
    rank,
    shutdown,
    world_size,
)
from fsdpc.estimate import TrainingCost, estimate, estimate_activations, training_cost
from fsdpc.fsdp_module import FSDPModule, register_fsdp_forward_method
from fsdpc.full_params import summon_full_params
from fsdpc.grad_mode import enable_grad, no_grad
from fsdpc.graph import GraphStep, graph_step
from fsdpc.memory import memory_stats
from fsdpc.memory_plan import MemoryPlan, memory_plan
from fsdpc.mesh import DeviceMesh, init_device_mesh
from fsdpc.nn.module import deferred_init
from fsdpc.nn.parameter import full_grad, full_tensor
from fsdpc.offload import OffloadPolicy
from fsdpc.policies import MixedPrecisionPolicy
from fsdpc.schedule import Schedule, schedule
from fsdpc.sharding import fully_shard
from fsdpc.simulate import SimulateOptions, Simulation, simulate
from fsdpc.strategies import ShardingStrategy

if TYPE_CHECKING:
    from fsdpc import amp, checkpoint, data, loggers, lr_scheduler, models, plots, wrap
    from fsdpc.auditor import Audited, audit
    from fsdpc.batch_size import find_batch_size
    from fsdpc.flight import FlightRecorder
    from fsdpc.launcher import launch
    from fsdpc.layout import ShardingLayout, sharding_layout
    from fsdpc.performance import PerformanceTracker, flops_per_token
    from fsdpc.planner import PlanOptions, Plans, plan
    from fsdpc.profiler import Profile, profile
    from fsdpc.stabilizer import Stabilized, StabilizerOptions, TrainingStabilizer



# What rooms above add to rooms below: pictures for notebooks, plans in errors, drills of faults.
def _drill(name: str) -> Callable[[Any], None]:
    def drill(what: Any) -> None:
        if "FSDPC_FAULT" in os.environ:
            getattr(importlib.import_module("fsdpc.faults"), name)(what)

    return drill


def _sharding(module: Any) -> str:
    return importlib.import_module("fsdpc.layout").sharding_layout(module)._repr_html_()


Tensor._repr_html_ = _shown.tensor  # type: ignore[attr-defined]
_shown.draws("sharded module", _sharding)
_shown.draws("memory of a model", lambda module: str(memory_plan(module, optimizer=0)))
_shard.drills.append(_shard.Drill(_drill("watch"), _drill("name_missing")))

_LAZY = {
    "amp", "checkpoint", "data", "launcher", "loggers", "lr_scheduler", "models",
    "plots", "testing", "wrap",
}  # fmt: skip

_FROM = {  # name -> the module that has it, imported when the first of its names is used
    "audit": "auditor",
    "Audited": "auditor",
    "find_batch_size": "batch_size",
    "FlightRecorder": "flight",
    "flops_per_token": "performance",
    "launch": "launcher",
    "PerformanceTracker": "performance",
    "plan": "planner",
    "PlanOptions": "planner",
    "Plans": "planner",
    "Profile": "profiler",
    "profile": "profiler",
    "sharding_layout": "layout",
    "ShardingLayout": "layout",
    "Stabilized": "stabilizer",
    "StabilizerOptions": "stabilizer",
    "TrainingStabilizer": "stabilizer",
}

__all__ = [
    "all_gather", "all_reduce", "amp", "arange", "audit", "Audited", "barrier", "bfloat16", "bool_",
    "broadcast", "checkpoint", "checkpoint_activations", "clip_grad_norm_", "clip_grad_value_",
    "cuda", "data", "deferred_init", "DeviceMesh", "distributed", "dtype", "empty", "empty_like",
    "enable_grad", "estimate", "estimate_activations", "eye", "find_batch_size", "FlightRecorder",
    "float16", "float32", "float64", "flops_per_token", "from_dlpack", "from_numpy", "FSDPModule",
    "full", "full_grad", "full_like", "full_tensor", "fully_shard", "functional",
    "get_default_device", "grad_norms", "graph_step", "GraphStep", "init", "init_device_mesh",
    "int32", "int64", "is_grad_enabled", "is_initialized", "launch", "linspace", "local_rank",
    "loggers", "lr_scheduler", "manual_seed", "memory_plan", "memory_stats", "MemoryPlan",
    "MismatchError", "MixedPrecisionPolicy", "models", "nn", "no_grad", "num_threads",
    "OffloadPolicy", "ones", "ones_like", "optim", "PeerError", "PerformanceTracker", "plan",
    "PlanOptions", "Plans", "plots", "Profile", "profile", "rand", "rand_like", "randint", "randn",
    "randn_like", "rank", "register_fsdp_forward_method", "reset_peak_memory_stats", "Schedule",
    "schedule", "set_default_device", "set_num_threads", "sharding_layout", "ShardingLayout",
    "ShardingStrategy", "show_config",
    "shutdown", "simulate", "SimulateOptions", "Simulation", "Stabilized", "StabilizerOptions",
    "summon_full_params", "tensor", "Tensor", "training_cost", "TrainingCost", "TrainingStabilizer",
    "uint8", "world_size", "wrap", "zeros", "zeros_like",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("load_ipython_extension", "unload_ipython_extension"):  # %load_ext fsdpc
        return getattr(importlib.import_module("fsdpc.notebook"), name)
    if name in _FROM:
        return getattr(importlib.import_module(f"fsdpc.{_FROM[name]}"), name)
    if name in _LAZY:
        return importlib.import_module(f"fsdpc.{name}")
    raise AttributeError(f"module 'fsdpc' has no attribute '{name}'")
