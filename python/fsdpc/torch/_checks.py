"""Checks that raise before a model is sharded or an optimizer steps."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdpc import _core, distributed
from fsdpc.sharding.rules import Inside
from fsdpc.torch import _device, _forward, _shards
from fsdpc.torch._param_layout import check_spec, local_of
from fsdpc.torch._subclasses import kind_of
from fsdpc.torch._unit import ShardInfo, UnitState
from fsdpc.torch.policies import SHARDED, CPUOffloadPolicy, MixedPrecisionPolicy, core_dtype


@cache
def log_once(text: str) -> None:
    """Warn once, on rank 0, that an option has no effect; call this after the ranks have joined."""
    rank = distributed.rank() if distributed.is_initialized() else torch.distributed.get_rank()
    if rank == 0:
        logging.getLogger("fsdpc.torch").warning(text)


#: The engine's instruction sets that multiply bfloat16 pairs.
_BF16_PRODUCTS = ("avx512bf16", "amx")
_warned = False


def warn_of_slow_products(modules: list[nn.Module], dtypes: set[torch.dtype | None]) -> None:
    """Warn once, on rank 0, that torch's bfloat16 products are slow on this processor.

    Parameters
    ----------
    modules : list of nn.Module
        The modules of a CPU unit.
    dtypes : set of (torch.dtype or None)
        The dtypes that its modules compute in.
    """
    global _warned
    if _warned or torch.bfloat16 not in dtypes:
        return
    if _core.runtime_config()["isa"] in _BF16_PRODUCTS:
        return
    if not any(type(m) is nn.Linear for module in modules for m in module.modules()):
        return
    _warned = True
    log_once(
        "this processor has no bfloat16 products (avx512_bf16, amx), and torch's are slow on it: "
        "fsdpc.torch.use_kernels(model) before fully_shard() takes the engine's for nn.Linear"
    )


def check_module(module: nn.Module) -> None:
    """Raise if a module contains something that a unit does not support."""
    name = type(module).__name__
    for inner in module.modules():
        wrapper = _wrapper(inner)
        if wrapper:
            raise ValueError(
                f"{name} holds a {wrapper}, which would handle parameters and gradients a second "
                "time: give fully_shard the module without it"
            )
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)):
            option = "max_norm" if inner.max_norm is not None else "sparse" if inner.sparse else ""
            if option:
                why = {"max_norm": "writes weights in forward", "sparse": "makes sparse gradients"}
                kind = "Embedding" if isinstance(inner, nn.Embedding) else "EmbeddingBag"
                raise NotImplementedError(
                    f"{name} holds an nn.{kind} whose {option} {why[option]}: make it without, or "
                    "name its weight in ignored_params"
                )


#: Wrappers that treat sharded parameters as whole parameters, or shard parameters themselves.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
}


def _wrapper(module: nn.Module) -> str:
    """Return the wrapper's name if a module is one of the known wrappers, or ""."""
    found = ((c.__module__, c.__name__) for c in type(module).__mro__)
    return next((".".join(each) for each in found if each in _WRAPPERS), "")


def refuse_wrapper(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Raise if a wrapper around a sharded module treats sharded parameters as whole parameters."""
    if name not in ("module", "_fsdp_wrapped_module") or not isinstance(inner, nn.Module):
        return
    wrapper = _wrapper(outer)
    if not wrapper:
        return
    left: Any = ()
    if wrapper.endswith("DistributedDataParallel"):  # other wrappers do not honour the ignore list
        left = getattr(inner, "_ddp_params_and_buffers_to_ignore", left)
    named = inner.named_parameters()
    held = next((p for key, p in named if hasattr(p, "fsdpc") and key not in left), None)
    if held is not None:
        raise RuntimeError(
            f"{wrapper} around {type(inner).__name__}, which fsdpc shards: this rank has "
            f"{held.fsdpc}, which it would take for the whole parameter. Units reduce "  # type: ignore[attr-defined]
            "gradients over ranks themselves: leave it out, or let DDP ignore them (replicate() "
            "has ignored_modules) where other parameters need it. accelerate's prepare(model), and "
            "so transformers' Trainer, adds it: use fsdpc.integrations.accelerate.prepare() and "
            "fsdpc.integrations.transformers.Trainer"
        )


def refuse_resizing(modules: list[nn.Module]) -> None:
    """Make transformers models raise an error if their embeddings are resized."""
    for m in modules:
        if hasattr(type(m), "resize_token_embeddings"):
            m.__dict__["resize_token_embeddings"] = partial(_refuse_resize, type(m).__name__)


def _refuse_resize(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"resize_token_embeddings() of {name}, which is sharded: units keep their shapes; call it "
        "before fully_shard(), on every rank"
    )


def check_sync_norms(inside: Inside, comms: list[_core.Comm]) -> None:
    """Raise if a SyncBatchNorm has no process group, because it would use per-rank statistics."""
    ranks = math.prod(comm.size for comm in comms)
    if ranks == 1 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # torch's own forward rejects tensors on CPUs
    name = next((path for path, m in inside if isinstance(m, nn.SyncBatchNorm)), None)
    if name is not None:
        raise RuntimeError(
            f"SyncBatchNorm '{name.rstrip('.')}' on {ranks} ranks, and torch.distributed is not "
            "initialised: it would compute with each rank's own statistics. Call "
            "torch.distributed.init_process_group() before fully_shard(), or use BatchNorm"
        )


def check_apart(params: list[tuple[str, nn.Parameter]]) -> None:
    """Raise if parameters overlap in memory, because shards cannot."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in ((name, local_of(p)) for name, p in params)
        if not p.is_meta and p.numel()
    )
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise ValueError(
                f"parameters '{name}' and '{other}' are over the same memory: tie them (one "
                "nn.Parameter under both names), or clone() one"
            )


def as_offload(policy: Any) -> Any:
    """Convert torch's offload policy to fsdpc's; raise unless it is one of the two or None."""
    if policy is not None and all(c.__name__ != "OffloadPolicy" for c in type(policy).__mro__):
        raise TypeError(
            "offload_policy takes an OffloadPolicy or a CPUOffloadPolicy, got "
            f"{type(policy).__name__}: {policy!r:.60}"
        )
    if not _device.on_cpu() and getattr(policy, "activations", "device") != "device":
        raise NotImplementedError(
            f"activations={policy.activations!r} where torch computes on GPUs: wrap blocks in "
            "torch's offload_wrapper, inside fully_shard"
        )
    if not hasattr(policy, "pin_memory"):
        return policy
    if not _device.on_cpu() and not policy.pin_memory:
        raise NotImplementedError(
            "CPUOffloadPolicy(pin_memory=False): the GPU reads masters where they lie, so they are "
            "in pinned memory; leave pin_memory out"
        )
    return policy if isinstance(policy, CPUOffloadPolicy) else CPUOffloadPolicy(policy.pin_memory)


def check_policy(policy: Any) -> None:
    """Raise unless this is a mixed precision policy of fsdpc or of torch's ``fully_shard``."""
    for field in fields(MixedPrecisionPolicy):
        if not hasattr(policy, field.name):
            raise TypeError(
                f"mp_policy takes a MixedPrecisionPolicy, got {type(policy).__name__}: {policy!r}"
            )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"mp_policy.{name} takes a torch.dtype or None, got {dtype!r}")


_RUNNING = (_forward.run.__code__, nn.Module._call_impl.__code__)


def check_place(modules: list[nn.Module]) -> None:
    """Raise if called in backward, or in the forward of a given module or an enclosing one."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError("fully_shard inside backward: shard before training")
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in _RUNNING:
            running = frame.f_locals.get("module", frame.f_locals.get("self"))
            inside = set(running.modules()) if isinstance(running, nn.Module) else set()
            for m in modules:
                if m in inside:
                    raise RuntimeError(
                        f"fully_shard({type(m).__name__}) inside the forward of "
                        f"{type(running).__name__}: shard before the first forward"
                    )
        frame = frame.f_back  # type: ignore[assignment]


def check_parameter(
    name: str,
    p: nn.Parameter,
    modules: list[nn.Module],
) -> None:
    """Raise if a parameter of these modules cannot be sharded."""
    holder = getattr(p, "_fsdpc_sharded", None) or getattr(p, "fsdpc", None)
    if isinstance(holder, ShardInfo):
        for outer in holder._state.modules:
            for inner in modules:
                if any(inner is m for m in outer.modules()):
                    raise ValueError(
                        f"{type(inner).__name__} is inside {type(outer).__name__}, which is "
                        f"sharded already and has its '{name}': call fully_shard on inner modules "
                        "before those around them"
                    )
    if holder is not None:
        raise ValueError(
            f"parameter '{name}' is sharded already, as {holder} (already managed by another FSDP "
            "group): modules that share (tie) a parameter belong into one unit; shard a module "
            "around them all, or give fully_shard a list of them"
        )
    check_kind(name, p)
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter '{name}' has hooks, which would go with it: call "
            "register_post_accumulate_grad_hook on it after fully_shard(), when it is this rank's "
            "rows"
        )
    if not p.is_contiguous():
        raise NotImplementedError(
            f"parameter '{name}' {tuple(p.shape)} is not contiguous (strides {p.stride()}), and "
            "FSDP does not support non-contiguous parameters: make it so before fully_shard()"
        )
    if p.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(
            f"parameter '{name}' is on {p.device}: units live on the CPU or on a GPU of CUDA"
        )


def left_whole(inside: Inside, ignored: list[Any]) -> list[tuple[str, nn.Parameter]]:
    """Return the plain frozen parameters of dtypes that units lack (wider integers, float8).

    Every rank keeps all of such a parameter.
    """
    named = [(path + key, p) for path, m in inside for key, p in m._parameters.items()]
    taken = {id(p) for p in ignored}
    return [
        (name, p)
        for name, p in named
        if type(p) is nn.Parameter
        and not (p.requires_grad or p.dtype in (*SHARDED, torch.uint8) or id(p) in taken)
    ]


def dimension_of(
    name: str, p: nn.Parameter, placement: Callable[[nn.Parameter], Any] | None
) -> int:
    """Return the dimension along which ``shard_placement_fn`` shards a parameter.

    Raises
    ------
    ValueError
        The function returns something else than None or ``Shard``.
    AssertionError
        The parameter has no such dimension, as in torch.
    """
    asked = placement(p) if placement else None
    if asked is None:
        return 0
    if type(asked) is not Shard:
        raise ValueError(
            f"shard_placement_fn gives {asked!r} for '{name}': it gives None or Shard(dim)"
        )
    if not -p.dim() <= asked.dim < p.dim():
        raise AssertionError(
            f"Shard dim {asked.dim} is invalid for {p.dim()}D tensor: shard_placement_fn gives it "
            f"for '{name}' {tuple(p.shape)}"
        )
    if asked.dim % p.dim() and kind_of(name, local_of(p)) is not None:
        raise NotImplementedError(
            f"shard_placement_fn gives {asked!r} for '{name}', a {type(p).__name__}: subclasses "
            "are sharded along dimension 0"
        )
    return int(asked.dim % p.dim())


def placement_on(
    mesh: Any, placement: Callable[[nn.Parameter], Any] | None, modules: list[nn.Module]
) -> Callable[[nn.Parameter], Any] | None:
    """Return a ``shard_placement_fn`` that refuses results on a mesh other than the unit's."""
    if placement is None:
        return None

    def asked(p: nn.Parameter) -> Any:
        result = placement(p)
        info = getattr(result, "mesh_info", None)
        if info is None:
            return result
        world = info.mesh.ndim == 1 and info.mesh.size() == torch.distributed.get_world_size()
        if info.mesh == mesh or (mesh is None and world):
            return result.placement
        name = next(n for m in modules for n, q in m.named_parameters() if q is p)
        raise NotImplementedError(
            f"shard_placement_fn asks for {info.mesh} for '{name}', and its module is sharded over "
            f"{mesh or 'all ranks'}: a unit has one mesh. Put these parameters into a module with "
            "a forward of its own, and first call fully_shard(that module, mesh=...)"
        )

    return asked


def check_kind(name: str, p: nn.Parameter) -> None:
    """Raise unless a parameter is a floating point tensor, or a subclass that units can store."""
    leave = "or leave it as it is with ignored_params"
    if isinstance(p, DTensor):
        check_spec(name, p)
        p = p._local_tensor  # type: ignore[assignment]
        if kind_of(name, p) is not None:
            raise NotImplementedError(
                f"parameter '{name}' is a DTensor of type {type(p).__name__}: shard the plain "
                f"tensor, {leave}"
            )
    elif kind_of(name, p) is not None:
        return
    if p.dtype is torch.uint8 and not p.requires_grad:
        return
    try:
        core_dtype(p.dtype)
    except TypeError as error:
        raise TypeError(f"parameter '{name}': {error}, {leave}") from None


class _Sharded:
    """The number of units; an optimizer checked at a lower count may hold replaced parameters."""

    units = 0


def mark_replaced(params: list[tuple[str, nn.Parameter]], state: UnitState) -> None:
    """Record for optimizers that a unit's sharded parameters have replaced these parameters."""
    _Sharded.units += 1
    for i, (name, p) in enumerate(params):
        p._fsdpc_sharded = f"'{name}' of unit '{state.unit.name}'"  # type: ignore[attr-defined]
        state.attributes[i].pop("_fsdpc_sharded", None)


def _refuse_states(optimizer: torch.optim.Optimizer, info: ShardInfo) -> None:
    """Raise if the offload policy moves states, because this optimizer allocates its own states."""
    offload = info.unit.offload
    if offload is not None and offload[3]:  # states
        on_host = offload[0] == "host"
        raise NotImplementedError(
            f"{type(optimizer).__name__} of {type(optimizer).__module__} keeps its states "
            f"{'on the GPU' if on_host else 'in memory'}, and the offload_policy of {info} has "
            f"optimizer='{'host' if on_host else 'disk'}': use an optimizer of fsdpc.torch.optim, "
            "or leave optimizer out of the policy"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise before a step that would have no effect or would differ from an unsharded step."""
    checked = (len(optimizer.param_groups), _Sharded.units)
    if getattr(optimizer, "_fsdpc_checked", None) == checked:
        return
    sharded = False
    for group in optimizer.param_groups:
        for p in group["params"]:
            where = getattr(p, "_fsdpc_sharded", None)
            if where is not None:
                raise RuntimeError(
                    f"this optimizer was made before fully_shard: it holds the old parameter "
                    f"{where}, which nothing reads any more; make it after"
                )
            info = getattr(p, "fsdpc", None)
            sharded |= info is not None
            if info is not None and not hasattr(optimizer, "shard_state"):
                _refuse_states(optimizer, info)
    if sharded and not hasattr(optimizer, "_fsdpc_checked"):
        optimizer.register_load_state_dict_pre_hook(_shards.check_all)
        for p, state in optimizer.state.items():  # loaded before the first step
            for key, value in state.items():
                _shards.check(p, key, value)
    optimizer._fsdpc_checked = checked  # type: ignore[attr-defined]


register_optimizer_step_pre_hook(check_optimizer)
register_module_module_registration_hook(refuse_wrapper)
