"""The inputs from which a unit is built, kept to rebuild it with different dtypes.

A recipe lives as long as its unit, so it does not refer to the original parameters, which are
freed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdpc import _core, distributed
from fsdpc.sharding import offload
from fsdpc.sharding.compression import Compression, unit_options
from fsdpc.sharding.offload import OffloadPolicy
from fsdpc.sharding.rules import Found, Inside, Placement
from fsdpc.torch import _device
from fsdpc.torch._param_layout import ParamLayout
from fsdpc.torch.policies import MixedPrecisionPolicy, core_dtype, engine_dtype


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A unit's description, without the dtypes and values of its parameters.

    Parameters
    ----------
    name : str
        A provisional name, until the root assigns one.
    modules : list of nn.Module
        The argument of one ``fully_shard`` call.
    names : list of str
    layouts : list of ParamLayout
    where : Placement
    policy : MixedPrecisionPolicy
    frozen : frozenset of int
        Parameters without gradients.
    synced : bool
        Whether rank 0's initial values are used.
    offload : OffloadPolicy, optional
    compression : Compression, optional
    mesh : DeviceMesh of torch, optional
        The mesh of the parameters, which are DTensors; None for plain parameters.
    placements : tuple of Placement
        How parameters are placed on the mesh.
    """

    name: str
    modules: list[nn.Module]
    names: list[str]
    layouts: list[ParamLayout]
    where: Placement
    policy: MixedPrecisionPolicy
    frozen: frozenset[int]
    synced: bool
    offload: OffloadPolicy | None = None
    compression: Compression | None = None
    mesh: Any = None
    placements: tuple[Any, ...] = ()

    def make(self, dtypes: list[torch.dtype]) -> _core.Unit:
        """Create a unit whose parameters have these dtypes but no values yet."""
        params = [
            _core.empty_deferred(tuple(layout.stored), engine_dtype(dtype))
            for layout, dtype in zip(self.layouts, dtypes, strict=True)
        ]
        for i, p in enumerate(params):
            p.requires_grad = i not in self.frozen
        return _core.Unit(
            self.name,
            self.names,
            params,
            self.where.comms[0],
            self.where.replicate,
            param_dtype=core_dtype(self.policy.param_dtype),
            reduce_dtype=core_dtype(self.policy.reduce_dtype),
            reshard_after_forward=self.where.reshard_after_forward,
            keep_grads=self.where.keep_grads,
            deterministic=distributed.is_deterministic(),
            modules=len(self.modules),
            offload=offload.opened(self.offload, self.where.comms[0]),
            band_per_param=self.mesh is not None,
            **unit_options(self.compression),
        )


def widened(
    params: Found, policy: MixedPrecisionPolicy, master_dtype: torch.dtype | None
) -> tuple[list[torch.dtype], MixedPrecisionPolicy]:
    """Return the dtypes of the masters, and a policy that preserves the compute dtypes.

    Raises
    ------
    ValueError
        Parameters have several dtypes and the policy does not name the compute dtype.
    """
    dtypes = [p.dtype for _, p, _ in params]
    if master_dtype is None:
        return dtypes, policy
    core_dtype(master_dtype)
    floats = {d for d in dtypes if d is not torch.uint8}
    narrow = {d for d in floats if d.itemsize < master_dtype.itemsize}
    if narrow and policy.param_dtype is None:
        if len(floats) > 1:
            raise ValueError(
                f"master_dtype={master_dtype} of a unit with parameters in "
                f"{sorted(map(str, floats))}: give mp_policy a param_dtype to compute in"
            )
        policy = replace(policy, param_dtype=next(iter(narrow)), cast_forward_inputs=False)
    wide = [master_dtype if d in narrow else d for d in dtypes]
    return wide, policy


def values_of(p: torch.Tensor, comms: list[_core.Comm], synced: bool) -> _core.Tensor:
    """Return a full value for the engine; if ``synced``, broadcast rank 0's value (collective)."""
    if not synced:
        return _device.to_engine(p.detach().contiguous())
    values = _device.to_engine(p.detach().clone(memory_format=torch.contiguous_format))
    for comm in reversed(comms):
        comm.broadcast(values, 0)
    return values


def readers_of(params: Found, inside: Inside, modules: list[nn.Module]) -> Inside:
    """Return (path, module) of the inner modules that directly contain a unit's parameters."""
    dicts = {id(owner) for _, _, at in params for owner, _ in at}
    return [(path, m) for path, m in inside if id(m._parameters) in dicts and m not in modules]
