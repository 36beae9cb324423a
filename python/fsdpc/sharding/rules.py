"""The rules of ``fully_shard`` that the native and torch frontends share.

Modules are from ``fsdpc.nn`` or torch. Both kinds have ``named_modules()``, ``named_children()``,
``_parameters`` and ``forward``. A sharded module also has ``_fsdpc_unit`` in its ``__dict__``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from fsdpc import _core, distributed
from fsdpc.sharding.mesh import DeviceMesh
from fsdpc.sharding.strategies import ShardingStrategy, apply_strategy, strategy_name

#: (path with a trailing dot, module) for each module of a unit.
Inside = list[tuple[str, Any]]
#: For each parameter: its name, the parameter, and (dictionary, key) of every reference to it.
Found = list[tuple[str, Any, list[tuple[dict[str, Any], str]]]]


class Frontend(NamedTuple):
    """The callbacks with which a frontend describes its sharded modules to fault drills."""

    records: Callable[[], bool]  # a backward will follow this forward, which recomputes nothing
    parameters: Callable[[Any], list[Any]]  # those of a module's unit, as its forward reads them


class Drill(NamedTuple):
    """A fault drill's hooks, called with each new unit's modules and with each named model."""

    sharded: Callable[[Sequence[Any], Frontend], None]
    named: Callable[[Any], None]


#: The package sets fault drills here (``fsdpc/__init__.py``); this module does not import them.
drills: list[Drill] = []


class ShardedError(AssertionError, TypeError, ValueError):
    """Raised if a module is sharded but must not be, or is not sharded but must be.

    The page docs/troubleshooting.md#exceptions explains what to do.
    PyTorch raises AssertionError for some of these cases and ValueError for others; Python raises
    TypeError for objects that cannot be copied.
    """


# ---- which modules and parameters ----


def as_modules(module: Any, base: type, takes: str, elsewhere: str) -> list[Any]:
    """Return the modules that will form one unit.

    Parameters
    ----------
    module : Module or list of Module
    base : type
        The base class of this frontend's modules.
    takes, elsewhere : str
        For the error: a name for that class, and the function for the other frontend's modules.

    Raises
    ------
    TypeError, ValueError, ShardedError
        A module cannot be a unit, or the modules cannot form one unit together.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard takes a module or a list of them, got an empty list")
    for m in modules:
        if not isinstance(m, base):
            raise TypeError(
                f"fully_shard takes {takes}, got {type(m).__name__} (a list of modules is one "
                f"unit); {elsewhere}"
            )
        name = type(m).__name__
        if is_sharded(m):
            raise ShardedError(
                f"{name} is sharded already: fully_shard was called twice. Each distinct "
                "composable distributed API can only be applied to a module once."
            )
        if type(m).forward is base.forward and "forward" not in m.__dict__:  # type: ignore[attr-defined]
            raise ValueError(
                f"{name} has no forward of its own, so nothing would gather its parameters "
                "(fully_shard does not support containers that do not implement forward): shard "
                "the modules in it (a list of them is one unit), or the module around it"
            )
    for k, m in enumerate(modules):
        names = {id(inner): name for name, inner in m.named_modules() if name}
        for n, other in enumerate(modules):
            if m is other and n < k:
                raise ValueError(f"fully_shard was given one {type(m).__name__} twice in a list")
            if id(other) in names:
                raise ValueError(
                    f"fully_shard was given a {type(m).__name__} and its own "
                    f"'{names[id(other)]}' in one list: leave the inner one out, which the outer "
                    "one holds anyway, or shard it first, by itself"
                )
    return modules


def as_params(option: str, params: Any, base: type) -> list[Any]:
    """Return the parameters listed in an option; raise if an entry is not a parameter."""
    if params is None:
        return []
    if isinstance(params, base) or not hasattr(params, "__iter__"):
        raise TypeError(
            f"{option} takes an iterable of parameters, got {type(params).__name__}: put the one "
            "into a list"
        )
    found = list(params)
    for p in found:
        if not isinstance(p, base):
            raise TypeError(
                f"{option} takes parameters, got {type(p).__name__} {p!r:.60}: pick them from "
                "model.named_parameters()"
            )
    return found


def shard_by_plan(
    groups: Iterable[tuple[Sequence[Any], Mapping[str, Any]]],
    options: Mapping[str, Any],
    shard: Callable[..., Any],
) -> None:
    """Shard the units of a plan, inner ones first; their own options override ``options``.

    Modules that are already sharded are left unchanged.

    Raises
    ------
    ValueError
        The plan contains an option that ``fully_shard`` does not accept.
    """
    for inner, own in groups:
        unknown = set(own) - {*options, "plan"}
        if unknown:
            raise ValueError(f"the plan has unknown options {sorted(unknown)}")
        if not any(map(is_sharded, inner)):
            shard(list(inner) if len(inner) > 1 else inner[0], **{**options, **own})


def outside_units(module: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (path, module) for a module and for all its submodules outside inner units."""
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        if not is_sharded(child) and id(child) not in seen:
            yield from outside_units(child, f"{path}{name}.", seen)


def inside_of(modules: Sequence[Any]) -> Inside:
    """Return the modules that a unit will contain, excluding those in inner units."""
    seen: set[int] = set()
    many = len(modules) > 1
    return [
        each
        for n, top in enumerate(modules)
        for each in outside_units(top, f"{n}." if many else "", seen)
    ]


def collect(inside: Inside, ignored: Iterable[Any], check: Callable[[str, Any], None]) -> Found:
    """Return the parameters that a unit will contain, without ignored ones; tied ones appear once.

    ``check`` is called with a name and a parameter, and raises if it cannot be sharded.
    """
    left = {id(p) for p in ignored}
    found: dict[int, tuple[str, Any, list[tuple[dict[str, Any], str]]]] = {}
    for path, owner in inside:
        for key, p in owner._parameters.items():
            if p is None or id(p) in left:
                continue
            if id(p) not in found:
                check(path + key, p)
                if p.ndim == 0:
                    raise ValueError(
                        f"parameter '{path + key}' is a scalar, which cannot be sharded. Change "
                        f"{path + key} to a 1D tensor with numel equal to 1, of shape (1,)"
                    )
                found[id(p)] = (path + key, p, [])
            found[id(p)][2].append((owner._parameters, key))
    return list(found.values())


# ---- over which ranks, and how ----


class Placement(NamedTuple):
    """The ranks that share a unit: ``comms`` is [shard] or [shard, replicate]."""

    comms: list[_core.Comm]
    reshard_after_forward: bool | None
    keep_grads: bool
    strategy: str

    @property
    def replicate(self) -> _core.Comm | None:
        """The ranks that own the same rows, or None if there are no replicas."""
        return self.comms[1] if len(self.comms) > 1 else None

    def __str__(self) -> str:
        return (
            f"mesh {[c.size for c in self.comms]}, "
            f"reshard_after_forward={self.reshard_after_forward}, keep_grads={self.keep_grads}, "
            f"deterministic={distributed.is_deterministic()}"
        )


def place(
    mesh: DeviceMesh | None, strategy: ShardingStrategy | str | None, reshard: bool | int | None
) -> Placement:
    """Return the placement that the arguments of ``fully_shard`` describe.

    Raises
    ------
    ValueError
        The mesh, the strategy and ``reshard_after_forward`` contradict each other.
    """
    mesh, reshard, keep_grads = apply_strategy(strategy, mesh, reshard)
    if mesh is None or mesh.ndim == 1:
        comms = [distributed.world() if mesh is None else mesh.comm(0)]
    else:
        comms = [mesh.comm(1), mesh.comm(0)][: 2 if mesh.shape[0] > 1 else 1]
    flag = check_reshard(reshard, comms[0].size)
    replicas = comms[1].size if len(comms) > 1 else 1
    return Placement(
        comms, flag, keep_grads, strategy_name(strategy, replicas, comms[0].size, flag)
    )


def check_reshard(value: bool | int | None, ranks: int) -> bool | None:
    """Normalise ``reshard_after_forward`` to True, False or None."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or ranks % value != 0:
        raise ValueError(
            f"reshard_after_forward={value!r}: True, False, None, or a number of ranks that "
            f"divides the shard group's {ranks}"
        )
    return value > 1  # as in PyTorch: 1 keeps everything, a group of all ranks means True


def describe(name: str, p: Any, value: str) -> str:
    """Return a line that ranks compare to check a parameter; ``value`` describes its contents."""
    dtype = str(getattr(p.dtype, "name", p.dtype)).removeprefix("torch.")
    return f"{name} {tuple(p.shape)} {dtype} requires_grad={p.requires_grad} {value}".rstrip()


# ---- units of a model ----


def is_sharded(module: Any) -> bool:
    """Return whether a module is a unit or part of one."""
    return "_fsdpc_unit" in module.__dict__


def sharded_modules(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for each sharded module in a tree of modules, outermost first."""
    return ((name, m) for name, m in module.named_modules() if is_sharded(m))


def units_of(module: Any) -> list[_core.Unit]:
    """Return the distinct units of a module and its submodules, outermost first."""
    return list(dict.fromkeys(m._fsdpc_unit for _, m in sharded_modules(module)))


def mesh_shape_of(module: Any) -> tuple[int, int]:
    """Return the shape of a sharded module's mesh; raise if its units are on several."""
    shapes = {unit.mesh_shape for unit in units_of(module)}
    if len(shapes) > 1:
        raise NotImplementedError(
            f"units on meshes of different shapes {sorted(shapes)}: one mesh is planned for; give "
            "mesh=(replicas, shards)"
        )
    return next(iter(shapes))


def enclosing(module: Any) -> dict[_core.Unit, bool]:
    """Return a module's units, outermost first, and whether each one encloses others."""
    found: dict[_core.Unit, bool] = {}
    for _, m in sharded_modules(module):
        inner = any(c._fsdpc_unit is not m._fsdpc_unit for _, c in sharded_modules(m))
        found[m._fsdpc_unit] = found.get(m._fsdpc_unit, False) or inner
    return found


def enclose(modules: Sequence[Any], frontend: Frontend) -> None:
    """Record in each sharded submodule which module now encloses it."""
    for outer in modules:
        for _, m in sharded_modules(outer):
            known = m.__dict__.get("_fsdpc_outer")
            if m not in modules and (not known or known() is None):
                m.__dict__["_fsdpc_outer"] = weakref.ref(outer)
    for drill in drills:
        drill.sharded(modules, frontend)


def outermost(module: Any) -> Any:
    """Return the outermost sharded module around this one, or the module itself if none is."""
    while (known := module.__dict__.get("_fsdpc_outer")) and (outer := known()) is not None:
        module = outer
    return module


def name_units(module: Any) -> None:
    """Name inner units after the dotted paths of their modules; a root keeps its name."""
    named: set[int] = set()
    for name, m in sharded_modules(module):
        if id(m._fsdpc_unit) not in named and name:
            m._fsdpc_unit.name = name
        named.add(id(m._fsdpc_unit))
    for drill in drills:
        drill.named(module)


@cache
def sharded_class(kind: type, cls: type, *more: type, prefix: str = "FSDP") -> type:
    """Return the class for sharded modules: a subclass of ``kind``, ``cls`` and then ``more``."""
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"{prefix}{cls.__name__}", (kind, cls, *more), names)
