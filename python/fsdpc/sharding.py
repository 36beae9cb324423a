"""``fully_shard``: parameters, gradients and optimizer states spread over ranks.

A module that has been sharded is a unit: its parameters are gathered when its forward or backward
runs and given up after. The engine (csrc/engine) decides when; this file finds the parameters,
checks that all ranks mean the same, and joins the module's call to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, TypeVar

import numpy as np

from fsdpc import _core, distributed
from fsdpc._core import MismatchError
from fsdpc.fsdp_module import FSDPModule, enclose
from fsdpc.mesh import DeviceMesh
from fsdpc.nn.module import Module, Parameter
from fsdpc.policies import MixedPrecisionPolicy
from fsdpc.strategies import ShardingStrategy, apply_strategy, strategy_name
from fsdpc.wrap import WrapPolicy, by_name, check_names, units_by

M = TypeVar("M", bound="Module | list[Module]")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[Parameter] | None = None,
    strategy: ShardingStrategy | str | None = None,
    plan: WrapPolicy | Mapping[str, Mapping[str, Any]] | None = None,
) -> M:
    """Shard a module's parameters over ranks, in place; collective.

    Call it on submodules first (each becomes a unit that is gathered by itself), then on the whole
    model, then make the optimizer.

    Parameters
    ----------
    module : Module or list of Module
        With parameters that no unit holds yet; tied ones stand in it once. The modules of a list
        form one unit: gathered before the first of them runs and given up after the last.
    mesh : DeviceMesh, optional
        All ranks where not given. Of two dimensions ``replicate x shard``: sharded within rows,
        gradients summed over columns too (HSDP).
    reshard_after_forward : bool or int, optional
        Give parameters up after forward and gather them again for backward. None: yes, except for
        the outermost module. An int n, a divisor of the shard group's size: give up all but what a
        group of n ranks needs to gather again: 1 keeps them (False), and more is the same as True
        where ranks share memory.
    mp_policy : MixedPrecisionPolicy, optional
        Dtypes of compute and communication; the original ones where not given.
    ignored_params : iterable of Parameter, optional
        Left alone: neither sharded nor reduced.
    strategy : ShardingStrategy or str, optional
        A name for a mesh and ``reshard_after_forward``.
    plan : WrapPolicy or mapping of str to dict, optional
        Which submodules to shard first: a policy of :mod:`fsdpc.wrap`, or patterns of dotted names
        with options (``{"layers.*": {}}``). All other options apply to them too.

    Returns
    -------
    the same module
        Its class is now a subclass of :class:`FSDPModule` and of what it was.

    Raises
    ------
    MismatchError
        Ranks disagree on names, shapes, dtypes or initial values; the first difference is named.
    TypeError, ValueError
        The module has no forward, is sharded already, or holds parameters that cannot be sharded.

    Notes
    -----
    Deferred parameters (:class:`fsdpc.deferred_init`) get memory for the own rows only.
    Source: ZeRO (Rajbhandari et al. 2020), PyTorch FSDP (Zhao et al. 2023).
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for m in modules:
        _check_module(m)
    _check_options(mesh, mp_policy, ignored_params)
    mesh, reshard_after_forward, keep_grads = apply_strategy(strategy, mesh, reshard_after_forward)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "ignored_params": list(ignored_params or ()),
    }
    if plan is not None:
        _shard_by_plan(modules, plan, {**options, "strategy": strategy})
    _make_unit(modules, strategy, keep_grads, **options)
    return module


def _check_options(mesh: Any, mp_policy: Any, ignored_params: Any) -> None:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, got {mesh!r}: init_device_mesh('cpu', (replicate, shard))"
        )
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}: "
            "MixedPrecisionPolicy(param_dtype=...)"
        )
    if isinstance(ignored_params, _core.Tensor):
        raise TypeError("ignored_params takes several parameters: put the one into a list")


def _shard_by_plan(modules: list[Any], plan: Any, options: dict[str, Any]) -> None:
    if not callable(plan):
        check_names(plan, modules)
    policy = plan if callable(plan) else by_name(plan)
    known = {*options, "plan"}
    for outer in modules:
        for child, own in units_by(policy, outer):
            unknown = set(own) - known
            if unknown:
                raise ValueError(f"the plan has unknown options {sorted(unknown)}")
            fully_shard(child, **{**options, **own})


def _make_unit(
    modules: list[Any],
    strategy: ShardingStrategy | str | None,
    keep_grads: bool,
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    mp_policy: MixedPrecisionPolicy | None,
    ignored_params: list[Parameter],
) -> None:
    policy = mp_policy or MixedPrecisionPolicy()
    names, params = _collect(modules, {id(p) for p in ignored_params})
    world = distributed.world()
    shard, replicate = _mesh_comms(mesh, world)
    reshard = _check_reshard(reshard_after_forward, shard.size)
    options = (
        f"{policy}, mesh {mesh or world.size}, reshard_after_forward={reshard_after_forward}, "
        f"keep_grads={keep_grads}, deterministic={distributed.is_deterministic()}"
    )
    title = "+".join(type(m).__name__ for m in modules)
    lines = [title, *map(_describe, names, params), options]
    check_agreement(lines, shard, replicate)
    unit = _core.Unit(
        title,
        names,
        params,
        shard,
        replicate,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        reshard_after_forward=reshard,
        keep_grads=keep_grads,
        deterministic=distributed.is_deterministic(),
        modules=len(modules),
    )
    for p in ignored_params:
        p._ignored = True
    for i, p in enumerate(params):
        recipe = p._recipe
        p._unit, p._index, p._name = unit, i, names[i]
        if recipe is not None:
            unit.init(i, *recipe)
            p._recipe = None
    replicas = replicate.size if replicate is not None else 1
    for m in modules:
        m.__dict__["_fsdpc_unit"] = unit
        m.__dict__["_fsdpc_strategy"] = strategy_name(strategy, replicas, shard.size, reshard)
        cls = type(m)
        sharded = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        object.__setattr__(m, "__class__", sharded)
    enclose(modules)


def _check_reshard(value: bool | int | None, ranks: int) -> bool | None:
    """Return True, False or None for ``reshard_after_forward``."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or ranks % value != 0:
        raise ValueError(
            f"reshard_after_forward={value!r}: True, False, None, or a number of ranks that "
            f"divides the shard group's {ranks}"
        )
    return value > 1  # as PyTorch: a group of one keeps all, of all ranks is True


def _check_module(module: Any) -> None:
    if not isinstance(module, Module):
        raise TypeError(
            f"fully_shard takes an fsdpc.nn.Module, got {type(module).__name__}; for torch modules "
            "use fsdpc.torch"
        )
    if isinstance(module, FSDPModule):
        name = type(module).__name__
        raise ValueError(f"{name} is sharded already: fully_shard was called twice")
    if type(module).forward is Module.forward:
        raise ValueError(
            f"{type(module).__name__} has no forward of its own, so nothing would gather its "
            "parameters: shard the modules in it, or the module around it"
        )


def _outside_units(module: Module, path: str, seen: set[int]) -> Iterator[tuple[str, Module]]:
    """Yield (dotted name, module) of all modules that no inner unit encloses."""
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule) and id(child) not in seen:
            yield from _outside_units(child, f"{path}{name}.", seen)


def _collect(modules: list[Any], ignored: set[int]) -> tuple[list[str], list[Parameter]]:
    found: dict[int, tuple[str, Parameter]] = {}
    seen: set[int] = set()
    for number, module in enumerate(modules):
        prefix = f"{number}." if len(modules) > 1 else ""
        for path, owner in _outside_units(module, prefix, seen):
            for name, p in owner._parameters.items():
                if p is not None and id(p) not in ignored and id(p) not in found:
                    _check_parameter(path + name, p)
                    found[id(p)] = (path + name, p)
    return [name for name, _ in found.values()], [p for _, p in found.values()]


def _check_parameter(name: str, p: Parameter) -> None:
    if p._unit is not None:
        raise ValueError(
            f"parameter '{name}' already belongs to unit '{p._unit.name}' as '{p._name}': shard "
            "children before parents, and modules that share (tie) a parameter together, in the "
            "unit of a module around them all"
        )
    if not p.dtype.is_floating_point:
        raise TypeError(
            f"parameter '{name}' is {p.dtype.name}; only floating point parameters can be "
            "sharded: make it a buffer"
        )
    if p.ndim == 0:
        raise ValueError(
            f"parameter '{name}' is a scalar, which cannot be sharded: give it shape (1,)"
        )
    if p.is_deferred and p._recipe is None:
        raise ValueError(f"deferred parameter '{name}' has no initial value: use fsdpc.nn.init")


def _mesh_comms(mesh: DeviceMesh | None, world: _core.Comm) -> tuple[_core.Comm, _core.Comm | None]:
    if mesh is None:
        return world, None
    if mesh.ndim == 1:
        return mesh.comm(0), None
    return mesh.comm(1), mesh.comm(0) if mesh.shape[0] > 1 else None


def _describe(name: str, p: Parameter) -> str:
    if p.is_deferred:
        value = f"deferred {p._recipe}"
    else:
        value = f"crc32c {_core.crc32c(0, np.ascontiguousarray(p.detach().bits())):08x}"
    return f"{name} {p.shape} {p.dtype.name} requires_grad={p.requires_grad} {value}"


def check_agreement(
    lines: list[str],
    shard: _core.Comm,
    replicate: _core.Comm | None,
    cure: str = "build and shard the same model, with the same seed, on every rank",
) -> None:
    """Compare what every rank is about to shard; a difference is named on all of them.

    All ranks at once where the mesh holds the world, else those of a row, then of a column.
    """
    world = distributed.world() if distributed.is_initialized() else None
    comms = [shard] if replicate is None else [shard, replicate]
    if world is not None and world.size == prod(comm.size for comm in comms):
        comms = [world]
    for comm in comms:
        if comm.size > 1:
            _agree(lines, comm, cure)


def _agree(lines: list[str], comm: _core.Comm, cure: str) -> None:
    text = "\n".join(lines).encode()
    mine = np.array([_core.crc32c(0, text), len(text)], dtype=np.int64)
    all_marks = comm.all_gather(_core.tensor(mine)).numpy()
    if (all_marks == all_marks[0]).all():
        return
    padded = np.zeros(int(all_marks[:, 1].max()), dtype=np.uint8)
    padded[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    rows = comm.all_gather(_core.tensor(padded)).numpy()
    lengths = all_marks[:, 1].tolist()
    texts = [bytes(r[:n]).decode().split("\n") for r, n in zip(rows, lengths, strict=True)]
    for other in range(1, comm.size):
        for i in range(max(len(texts[0]), len(texts[other]))):
            a = texts[0][i] if i < len(texts[0]) else "nothing more"
            b = texts[other][i] if i < len(texts[other]) else "nothing more"
            if a != b:
                raise MismatchError(
                    f"fully_shard: ranks disagree on the model: rank 0 has [{a}], rank {other} has "
                    f"[{b}]; {cure}"
                )
