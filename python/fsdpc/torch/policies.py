"""Precision and offload policies for torch, with the names of FSDP2 and the dtypes of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fsdpc import _core
from fsdpc.sharding.offload import OffloadPolicy


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes for a unit's compute and communication; a drop-in replacement for FSDP2's.

    Parameters
    ----------
    param_dtype : torch.dtype, optional
        Dtype of gathered parameters, and therefore of compute; the original dtype by default.
    reduce_dtype : torch.dtype, optional
        Dtype in which gradients are written and sent; ``param_dtype`` by default. Sums over ranks
        always use float32.
    output_dtype : torch.dtype, optional
        Dtype that the module's floating point outputs are cast to.
    cast_forward_inputs : bool, default True
        Whether to cast the module's floating point inputs to ``param_dtype``.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import MixedPrecisionPolicy, fully_shard
    >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    >>> model = fully_shard(torch.nn.Linear(4, 2), mp_policy=policy)
    >>> model(torch.ones(1, 4)).dtype
    torch.bfloat16
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep masters, gradients and optimizer states in host memory, as CPUs always do.

    Parameters
    ----------
    pin_memory : bool, default True
        Has no effect on CPUs; GPUs require it, because they access only pinned memory.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import CPUOffloadPolicy
    >>> policy = CPUOffloadPolicy(optimizer="disk", path="/tmp")
    >>> policy.masters, policy.optimizer
    ('host', 'disk')
    """

    pin_memory: bool = True
    masters: str = field(default="host", kw_only=True)
    gradients: str = field(default="host", kw_only=True)
    optimizer: str = field(default="host", kw_only=True)


#: The dtypes that parameters of units may have.
SHARDED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def core_dtype(dtype: torch.dtype | None) -> _core.dtype | None:
    """Return the engine's dtype with the same name."""
    if dtype is None:
        return None
    if dtype not in SHARDED:
        raise TypeError(
            f"{dtype} cannot be sharded or communicated in: use float32, bfloat16, float16 or "
            "float64"
        )
    return engine_dtype(dtype)


def engine_dtype(dtype: torch.dtype) -> _core.dtype:
    """Return the engine's dtype with the same name, of what units store too (bytes)."""
    return _core.as_dtype(str(dtype).removeprefix("torch."))
