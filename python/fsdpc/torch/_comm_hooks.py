"""torch's built-in communication hooks of DDP, as options of units."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from fsdpc import _core
from fsdpc.distributed.agree import check_agreement
from fsdpc.sharding.compression import PowerSGD, low_rank

#: Forms of sums between hosts, by the names of torch's hooks.
_FORMS = {"allreduce_hook": "exact", "bf16_compress_hook": "bf16", "fp16_compress_hook": "fp16"}
_KNOWN = (*_FORMS, "powerSGD_hook")


def register(units: list[_core.Unit], state: Any, hook: Any) -> None:
    """Set up units of one model for a hook of torch; collective.

    Raises
    ------
    MismatchError
        Ranks register different hooks.
    NotImplementedError
        The hook is not one of torch's, belongs to a group other than the units', or has already
        taken steps.
    """
    name = getattr(hook, "__name__", "")
    known = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms")
    if name not in _KNOWN or not known:
        raise NotImplementedError(
            f"register_comm_hook({hook!r}): gradients are summed inside the engine, which "
            f"knows torch's own {', '.join(_KNOWN)}; read .grad after backward"
        )
    in_low_rank = name not in _FORMS
    group = state.process_group if in_low_rank else state
    ranks = math.prod(units[0].mesh_shape)
    if group is not None and dist.get_world_size(group) != ranks:
        raise NotImplementedError(
            f"register_comm_hook({group!r}): gradients are summed over the model's own {ranks} "
            "ranks"
        )
    replicas = _power_sgd(state) if in_low_rank else None
    check_agreement([f"{name} {replicas}"], units[0].comms, "register equal hooks on every rank")
    for unit in units:
        if replicas is not None:
            unit.low_rank = low_rank(replicas)
        else:
            unit.reduce_codec = _FORMS[name]


def _power_sgd(state: Any) -> PowerSGD:
    """Return the options of torch's ``PowerSGDState``, whose seed is its generator's first word."""
    if state.iter > 0:
        raise NotImplementedError(
            f"a PowerSGDState after {state.iter} steps: the engine has its own errors and factors, "
            "which fsdpc.checkpoint.load restores, so give it a new one"
        )
    return PowerSGD(
        rank=state.matrix_approximation_rank,
        start_step=state.start_powerSGD_iter,
        warm_start=state.warm_start,
        error_feedback=state.use_error_feedback,
        min_compression_rate=state.min_compression_rate,
        seed=int(state.rng.get_state()[1][0]),
    )
