"""``fully_shard``: parameters, gradients and optimizer states spread over ranks.

A module that has been sharded is a unit: its parameters are gathered when its forward or backward
runs and given up after. The engine (csrc/engine) decides when; this file finds the parameters,
checks that all ranks mean the same, and joins the module's call to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from fsdpc import _core, distributed
from fsdpc._core import MismatchError, Tensor
from fsdpc.mesh import DeviceMesh
from fsdpc.nn.module import Module, Parameter
from fsdpc.policies import MixedPrecisionPolicy

M = TypeVar("M", bound=Module)


class FSDPModule:
    """What :func:`fully_shard` adds to a module, with PyTorch FSDP2's names."""

    _fsdpc_unit: _core.Unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._fsdpc_unit
        if not unit.has_root:
            _make_root(self)
        return unit.call(self.forward, args, kwargs)

    def unshard(self) -> None:
        """Gather this unit's parameters and hold them until :meth:`reshard`; collective."""
        if not self._fsdpc_unit.has_root:
            _make_root(self)
        self._fsdpc_unit.unshard()

    def reshard(self) -> None:
        """Give up the parameters that :meth:`unshard` gathered."""
        self._fsdpc_unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are given up between forward and backward."""
        for unit in self._units(recurse):
            unit.set_reshard_after_forward(bool(reshard_after_forward))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"the divide factor must be above 0, got {factor}")
        self._fsdpc_unit.set_divide_factor(float(factor))

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: bring every unit back to its sharded state."""
        self._fsdpc_unit.reset()

    def _units(self, recurse: bool) -> list[_core.Unit]:
        if not recurse:
            return [self._fsdpc_unit]
        return [m._fsdpc_unit for m in self.modules() if isinstance(m, FSDPModule)]

    def __reduce__(self) -> Any:
        raise TypeError("a sharded module is not pickled: save its state_dict()")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a sharded module cannot be copied: copy it before fully_shard()")


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[Parameter] | None = None,
) -> M:
    """Shard a module's parameters over ranks, in place; collective.

    Call it on submodules first (each becomes a unit that is gathered by itself), then on the whole
    model, then make the optimizer.

    Parameters
    ----------
    module : Module
        With parameters that no unit holds yet; tied ones stand in it once.
    mesh : DeviceMesh, optional
        One-dimensional (``shard``); all ranks where not given.
    reshard_after_forward : bool, optional
        Give parameters up after forward and gather them again for backward. None: yes, except for
        the outermost module.
    mp_policy : MixedPrecisionPolicy, optional
        Dtypes of compute and communication; the original ones where not given.
    ignored_params : iterable of Parameter, optional
        Left alone: neither sharded nor reduced.

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
    _check_module(module)
    policy = mp_policy or MixedPrecisionPolicy()
    ignored = list(ignored_params or ())
    names, params = _collect(module, {id(p) for p in ignored})
    world = distributed.world()
    shard, replicate = _mesh_comms(mesh, world)
    options = f"{policy}, mesh {mesh or world.size}, reshard_after_forward={reshard_after_forward}"
    lines = [type(module).__name__, *map(_describe, names, params), options]
    _check_agreement(lines, world)
    unit = _core.Unit(
        type(module).__name__,
        names,
        params,
        shard,
        replicate,
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        reshard_after_forward=reshard_after_forward,
    )
    for p in ignored:
        p._ignored = True
    for i, p in enumerate(params):
        recipe = p._recipe
        p._unit, p._index, p._name = unit, i, names[i]
        if recipe is not None:
            unit.init(i, *recipe)
            p._recipe = None
    module.__dict__["_fsdpc_unit"] = unit
    cls = type(module)
    sharded = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    object.__setattr__(module, "__class__", sharded)
    return module


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


def _collect(module: Module, ignored: set[int]) -> tuple[list[str], list[Parameter]]:
    found: dict[int, tuple[str, Parameter]] = {}
    for path, owner in _outside_units(module, "", set()):
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
    if mesh.shape[0] > 1:
        raise NotImplementedError(f"{mesh}: replicated meshes (HSDP) are not supported yet")
    return mesh.comm(1), None


def _describe(name: str, p: Parameter) -> str:
    if p.is_deferred:
        value = f"deferred {p._recipe}"
    else:
        value = f"crc32c {_core.crc32c(0, np.ascontiguousarray(p.detach().numpy())):08x}"
    return f"{name} {p.shape} {p.dtype.name} requires_grad={p.requires_grad} {value}"


def _check_agreement(lines: list[str], comm: _core.Comm) -> None:
    """Compare what every rank is about to shard; a difference is named on all of them."""
    if comm.size == 1:
        return
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
                    f"[{b}]; build and shard the same model, with the same seed, on every rank"
                )


def _make_root(module: Any) -> None:
    """Join a module's unit and all units inside it, at its first call."""
    units, encloses = [], []
    for name, m in module.named_modules():
        if isinstance(m, FSDPModule):
            if name:
                m._fsdpc_unit.name = name
            units.append(m._fsdpc_unit)
            inner = any(isinstance(c, FSDPModule) for c in m.modules() if c is not m)
            encloses.append(inner)
    _core.make_root(units, encloses)


def full_tensor(p: Tensor) -> Tensor:
    """Return a parameter's full value in its original dtype; collective if it is sharded."""
    unit = getattr(p, "_unit", None)
    return p.detach() if unit is None else unit.collect(p._index, False)


def full_grad(p: Tensor) -> Tensor | None:
    """Return a parameter's full averaged gradient, or None; collective if it is sharded."""
    unit = getattr(p, "_unit", None)
    if p.grad is None:
        return None
    return p.grad if unit is None else unit.collect(p._index, True)
