"""Fully sharded data parallel training: a C engine with a thin Python layer.

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

Importing fsdpc requires only NumPy, starts no threads and opens no sockets.
"""

from __future__ import annotations

from fsdpc.cli import ctrl_c  # isort: skip  # noqa: F401  # before the slow imports

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdpc import distributed, functional, nn, optim
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
from fsdpc.display import html
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
from fsdpc.nn.module import deferred_init
from fsdpc.nn.parameter import full_grad, full_tensor
from fsdpc.optim.ema import EMA
from fsdpc.optim.outer import Outer
from fsdpc.planning.estimate import TrainingCost, estimate, estimate_activations, training_cost
from fsdpc.planning.memory_plan import MemoryPlan, memory_plan
from fsdpc.planning.schedule import Schedule, schedule
from fsdpc.planning.simulate import SimulateOptions, Simulation, simulate
from fsdpc.sharding import rules
from fsdpc.sharding.activation import checkpoint_activations
from fsdpc.sharding.clip import clip_grad_norm_, clip_grad_value_, grad_norms
from fsdpc.sharding.compression import Compression, PowerSGD
from fsdpc.sharding.fsdp_module import FSDPModule, register_fsdp_forward_method
from fsdpc.sharding.full_params import summon_full_params
from fsdpc.sharding.fully_shard import fully_shard
from fsdpc.sharding.graph import GraphStep, graph_step
from fsdpc.sharding.memory import memory_stats
from fsdpc.sharding.mesh import DeviceMesh, init_device_mesh
from fsdpc.sharding.offload import OffloadPolicy
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.sharding.strategies import ShardingStrategy
from fsdpc.sharding.tiles import tile_tokens
from fsdpc.tensors import cuda
from fsdpc.tensors.creation import (
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
from fsdpc.tensors.device import get_default_device, set_default_device
from fsdpc.tensors.grad_mode import enable_grad, no_grad

if TYPE_CHECKING:
    from fsdpc import checkpoint, data, models
    from fsdpc.launching.launcher import launch
    from fsdpc.monitor import loggers, plots
    from fsdpc.monitor.auditor import Audited, audit
    from fsdpc.monitor.batch_size import find_batch_size
    from fsdpc.monitor.compression import CompressionReport, compression_report
    from fsdpc.monitor.config import show_config
    from fsdpc.monitor.flight import FlightRecorder
    from fsdpc.monitor.performance import PerformanceTracker, flops_per_token
    from fsdpc.monitor.profiler import Profile, profile
    from fsdpc.monitor.stabilizer import Stabilized, StabilizerOptions, TrainingStabilizer
    from fsdpc.optim import lr_scheduler
    from fsdpc.planning.fit_activations import FittedActivations, fit_activations
    from fsdpc.planning.layout import ShardingLayout, sharding_layout
    from fsdpc.planning.planner import PlanOptions, Plans, plan
    from fsdpc.sharding import amp, wrap



# Hooks that higher-level packages install in lower-level ones: notebook pictures, plans in errors,
# fault drills.
def _drill(name: str) -> Callable[..., None]:
    def drill(*args: Any) -> None:
        if "FSDPC_FAULT" in os.environ:
            getattr(importlib.import_module("fsdpc.monitor.faults"), name)(*args)

    return drill


def _sharding(module: Any) -> str:
    return importlib.import_module("fsdpc.planning.layout").sharding_layout(module)._repr_html_()


Tensor._repr_html_ = html.tensor  # type: ignore[attr-defined]
html.draws("sharded module", _sharding)
html.draws("memory of a model", lambda module: str(memory_plan(module, optimizer=0)))
rules.drills.append(rules.Drill(_drill("watch"), _drill("name_missing")))

_MODULES = {  # public modules, imported on first use
    "amp": "sharding.amp",
    "checkpoint": "checkpoint",
    "data": "data",
    "launcher": "launching.launcher",
    "loggers": "monitor.loggers",
    "lr_scheduler": "optim.lr_scheduler",
    "models": "models",
    "plots": "monitor.plots",
    "testing": "testing",
    "wrap": "sharding.wrap",
}

_FROM = {  # name -> its module, imported when any of its names is first used
    "audit": "monitor.auditor",
    "Audited": "monitor.auditor",
    "compression_report": "monitor.compression",
    "CompressionReport": "monitor.compression",
    "find_batch_size": "monitor.batch_size",
    "fit_activations": "planning.fit_activations",
    "FittedActivations": "planning.fit_activations",
    "FlightRecorder": "monitor.flight",
    "flops_per_token": "monitor.performance",
    "launch": "launching.launcher",
    "PerformanceTracker": "monitor.performance",
    "plan": "planning.planner",
    "PlanOptions": "planning.planner",
    "Plans": "planning.planner",
    "Profile": "monitor.profiler",
    "profile": "monitor.profiler",
    "sharding_layout": "planning.layout",
    "ShardingLayout": "planning.layout",
    "show_config": "monitor.config",
    "Stabilized": "monitor.stabilizer",
    "StabilizerOptions": "monitor.stabilizer",
    "TrainingStabilizer": "monitor.stabilizer",
}

__all__ = [
    "all_gather", "all_reduce", "amp", "arange", "audit", "Audited", "barrier", "bfloat16",
    "bool_", "broadcast", "checkpoint", "checkpoint_activations", "clip_grad_norm_",
    "clip_grad_value_", "Compression", "compression_report", "CompressionReport", "cuda",
    "data", "deferred_init", "DeviceMesh", "distributed", "dtype", "EMA", "empty", "empty_like",
    "enable_grad", "estimate", "estimate_activations", "eye", "find_batch_size",
    "fit_activations", "FittedActivations", "FlightRecorder", "float16", "float32", "float64",
    "flops_per_token", "from_dlpack", "from_numpy", "FSDPModule", "full", "full_grad",
    "full_like", "full_tensor", "fully_shard", "functional", "get_default_device", "grad_norms",
    "graph_step", "GraphStep", "init", "init_device_mesh", "int32", "int64", "is_grad_enabled",
    "is_initialized", "launch", "linspace", "local_rank", "loggers", "lr_scheduler",
    "manual_seed", "memory_plan", "memory_stats", "MemoryPlan", "MismatchError",
    "MixedPrecisionPolicy", "models", "nn", "no_grad", "num_threads", "OffloadPolicy", "ones",
    "ones_like", "optim", "Outer", "PeerError", "PerformanceTracker", "plan", "PlanOptions",
    "Plans", "plots", "PowerSGD", "Profile", "profile", "rand", "rand_like", "randint", "randn",
    "randn_like", "rank", "register_fsdp_forward_method", "reset_peak_memory_stats", "Schedule",
    "schedule", "set_default_device", "set_num_threads", "sharding_layout", "ShardingLayout",
    "ShardingStrategy", "show_config", "shutdown", "simulate", "SimulateOptions", "Simulation",
    "Stabilized", "StabilizerOptions", "summon_full_params", "tensor", "Tensor", "tile_tokens",
    "training_cost", "TrainingCost", "TrainingStabilizer", "uint8", "world_size", "wrap",
    "zeros", "zeros_like",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("load_ipython_extension", "unload_ipython_extension"):  # %load_ext fsdpc
        return getattr(importlib.import_module("fsdpc.notebook"), name)
    if name in _FROM:
        return getattr(importlib.import_module(f"fsdpc.{_FROM[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"fsdpc.{_MODULES[name]}")
    raise AttributeError(f"module 'fsdpc' has no attribute '{name}'")
