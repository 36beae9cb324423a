"""``fully_shard``: shard parameters, gradients and optimizer states over ranks.

A sharded module is a unit, whose parameters are gathered for its forward and backward and freed
afterwards. The engine (csrc/engine) decides when; this file creates the unit as rules.py specifies
and routes the module's calls through the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from fsdpc import _core, distributed
from fsdpc.distributed.agree import check_agreement
from fsdpc.nn.module import Module, Parameter, mark_inside
from fsdpc.sharding import offload, rules
from fsdpc.sharding.compression import Compression, check_compression, unit_options, words
from fsdpc.sharding.fsdp_module import FSDPModule
from fsdpc.sharding.mesh import DeviceMesh
from fsdpc.sharding.offload import OffloadPolicy
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.sharding.saved import check_leaves, store_of
from fsdpc.sharding.strategies import ShardingStrategy
from fsdpc.sharding.wrap import WrapPolicy, by_name, check_names, units_by
from fsdpc.tensors.device import get_default_device

M = TypeVar("M", bound="Module | list[Module]")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[Parameter] | None = None,
    strategy: ShardingStrategy | str | None = None,
    offload_policy: OffloadPolicy | None = None,
    compression: Compression | None = None,
    plan: WrapPolicy | Mapping[str, Mapping[str, Any]] | None = None,
) -> M:
    """Shard a module's parameters over ranks, in place; collective.

    Call this on submodules first (each becomes a unit with its own all-gather), then on the whole
    model; create the optimizer afterwards.

    Parameters
    ----------
    module : Module or list of Module
        Must have parameters that do not belong to a unit yet; tied parameters count once. The
        modules in a list form one unit, which is gathered before the first of them runs and freed
        after the last.
    mesh : DeviceMesh, optional
        All ranks by default. With two dimensions, ``replicate x shard``, parameters are sharded
        within rows and gradients are also summed over columns (HSDP).
    reshard_after_forward : bool or int, optional
        Whether to free parameters after forward and gather them again for backward. None means yes,
        except for the outermost module. An int n that divides the shard group's size keeps the part
        that a group of n ranks needs for the second all-gather. 1 keeps everything (False). If
        ranks share memory, a larger n is equivalent to True.
    mp_policy : MixedPrecisionPolicy, optional
        Dtypes of compute and communication; by default the original dtypes.
    ignored_params : iterable of Parameter, optional
        Parameters that are neither sharded nor reduced.
    strategy : ShardingStrategy or str, optional
        Shorthand for a mesh and ``reshard_after_forward``.
    offload_policy : OffloadPolicy, optional
        The arrays to keep on a disk; none by default.
    compression : Compression, optional
        How parameters and gradients travel between hosts; as they are by default.
    plan : WrapPolicy or mapping of str to dict, optional
        Submodules to shard first: a policy from :mod:`fsdpc.wrap`, or dotted name patterns with
        options (``{"layers.*": {}}``). All other options also apply to these submodules.

    Returns
    -------
    the same module
        Its new class is a subclass of :class:`FSDPModule` and of its previous class.

    Raises
    ------
    MismatchError
        Ranks disagree on names, shapes, dtypes or initial values; the error names the first one.
    TypeError, ValueError
        The module has no forward, is already sharded, or has parameters that cannot be sharded.

    Notes
    -----
    For deferred parameters (:class:`fsdpc.deferred_init`), only this rank's rows are allocated.
    Sources: ZeRO (Rajbhandari et al. 2020), PyTorch FSDP (Zhao et al. 2023).

    Examples
    --------
    >>> import fsdpc
    >>> model = fsdpc.nn.Sequential(fsdpc.nn.Linear(4, 4), fsdpc.nn.Linear(4, 1))
    >>> for layer in model:
    ...     _ = fsdpc.fully_shard(layer)
    >>> _ = fsdpc.fully_shard(model)
    >>> optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model(fsdpc.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """
    modules = rules.as_modules(
        module, Module, "an fsdpc.nn.Module", "for torch modules use fsdpc.torch"
    )
    _check_options(mesh, mp_policy, offload_policy)
    check_compression(compression)
    ignored = rules.as_params("ignored_params", ignored_params, _core.Tensor)
    if plan is not None:
        options = {
            "mesh": mesh,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": mp_policy,
            "ignored_params": ignored,
            "strategy": strategy,
            "offload_policy": offload_policy,
            "compression": compression,
        }
        if not callable(plan):
            check_names(plan, modules)
        groups = units_by(plan if callable(plan) else by_name(plan), modules)
        rules.shard_by_plan(groups, options, fully_shard)
    where = rules.place(mesh, strategy, reshard_after_forward)
    policy = mp_policy or MixedPrecisionPolicy()
    _make_unit(modules, where, policy, offload_policy, compression, ignored)
    return module


def _check_options(mesh: Any, mp_policy: Any, offload_policy: Any) -> None:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, got {mesh!r}: init_device_mesh('cpu', (replicate, shard))"
        )
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}: "
            "MixedPrecisionPolicy(param_dtype=...)"
        )
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy must be an OffloadPolicy, got {offload_policy!r}: "
            "OffloadPolicy(optimizer='disk', path=...)"
        )


def _make_unit(
    modules: list[Any],
    where: rules.Placement,
    policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy | None,
    compression: Compression | None,
    ignored: list[Parameter],
) -> None:
    inside = rules.inside_of(modules)
    found = rules.collect(inside, ignored, _check_parameter)
    names, params = [name for name, _, _ in found], [p for _, p, _ in found]
    title = "+".join(type(m).__name__ for m in modules)
    lines = [rules.describe(name, p, _value(p)) for name, p, _ in found]
    lines.append(f"{policy}, {where}{offload.words(offload_policy)}{words(compression)}")
    check_agreement([title, *lines], where.comms)
    check_leaves(offload_policy, get_default_device())
    store = store_of(offload_policy, where.comms[0].world_rank)
    if any(getattr(d, "_fsdpc_saved", None) is not None for m in modules for d in m.modules()):
        store = None  # units inside let their own leave
    # A parameter that has memory also has values, perhaps loaded from a file after deferred
    # creation.
    recipes = [p._recipe if p.is_deferred else None for p in params]
    unit = _core.Unit(
        title,
        names,
        params,
        where.comms[0],
        where.replicate,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        reshard_after_forward=where.reshard_after_forward,
        keep_grads=where.keep_grads,
        deterministic=distributed.is_deterministic(),
        modules=len(modules),
        offload=offload.opened(offload_policy, where.comms[0]),
        **unit_options(compression),
    )
    for p in ignored:
        p._ignored = True
    for i, (p, recipe) in enumerate(zip(params, recipes, strict=True)):
        p._unit, p._index, p._name = unit, i, names[i]
        if recipe is not None:
            recipe.fill_unit(unit, i)
        p._recipe = None
    mark_inside(m for _, m in inside)
    for m in modules:
        m.__dict__["_fsdpc_unit"] = unit
        m.__dict__["_fsdpc_saved"] = store
        m.__dict__["_fsdpc_strategy"] = where.strategy
        object.__setattr__(m, "__class__", rules.sharded_class(FSDPModule, type(m)))
    rules.enclose(modules, _FRONTEND)


_FRONTEND = rules.Frontend(
    records=lambda: _core.is_grad_enabled() and not _core.in_backward(),
    parameters=lambda module: [p for p in module.parameters() if p._unit is module._fsdpc_unit],
)


def _check_parameter(name: str, p: Parameter) -> None:
    if p._unit is not None:
        raise ValueError(
            f"parameter '{name}' already belongs to unit '{p._unit.name}' as '{p._name}': shard "
            "children before parents, and modules that share (tie) a parameter together, in the "
            "unit of a module around them all"
        )
    is_frozen_bytes = p.dtype == _core.uint8 and not p.requires_grad
    if not (p.dtype.is_floating_point or is_frozen_bytes):
        raise TypeError(
            f"parameter '{name}' is {p.dtype.name}; only floating point parameters and frozen "
            "uint8 ones can be sharded: make it a buffer"
        )
    if p.is_deferred and p._recipe is None:
        raise ValueError(f"deferred parameter '{name}' has no initial value: use fsdpc.nn.init")


def _value(p: Parameter) -> str:
    if p.is_deferred:
        return f"deferred {p._recipe}"
    return f"crc32c {_core.crc32c(0, np.ascontiguousarray(p.detach().bits())):08x}"
