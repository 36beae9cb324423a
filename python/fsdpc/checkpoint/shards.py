"""A rank's part of a model and an optimizer, as shards of named tensors.

Saving and loading access frontends only through this module; other frontends register their
functions with ``shards_of.register`` and ``access_of.register``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from math import prod
from typing import Any, NamedTuple

from fsdpc import _core, distributed
from fsdpc._core import Tensor
from fsdpc.checkpoint.schema import FILE_DTYPES
from fsdpc.nn.module import Module, Parameter
from fsdpc.nn.parameter import RowCode
from fsdpc.optim import factored, formats
from fsdpc.optim.optimizer import Optimizer


class Code(NamedTuple):
    """The scheme of codes that only a model of the same scheme can read; see ``RowCode``."""

    scheme: str
    columns: int

    def __str__(self) -> str:
        return f"{self.scheme}, {self.columns} columns"


@dataclass(frozen=True)
class Shard:
    """Consecutive elements of one tensor, and the memory that contains them.

    Parameters
    ----------
    name : str
        Name in ``state_dict()``.
    shape : tuple of int
        Shape of the whole tensor.
    first, numel : int
        This rank's elements.
    memory : Tensor
        Contains exactly these elements; loading writes to it.
    replica : int
        Several ranks may hold the same elements; this is the index of this copy. Copy 0 is written.
        The ranks with the same index together hold one whole copy.
    raw : str, default ""
        The dtype in files, if ``memory`` contains the elements as raw bytes; otherwise "".
    unit : str, default ""
        Name of the unit that has this master; "" for anything but a unit's parameter.
    code : RowCode or Code, optional
        How a quantised weight stores its rows; by a RowCode, floats in files are encoded.
    exact : bool, default False
        Files have this dtype whatever dtype is asked of floating point tensors.
    frozen : bool, default False
        Whether this is of a parameter that requires no gradient.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    numel: int
    memory: Tensor
    replica: int
    raw: str = ""
    unit: str = ""
    code: RowCode | Code | None = None
    exact: bool = False
    frozen: bool = False

    @property
    def dtype(self) -> str:
        """The dtype's name in files."""
        return self.raw or FILE_DTYPES[self.memory.dtype.name]


def _nothing(names: Collection[str]) -> None:
    """Do nothing; the default for the callback that runs after a model's shards are read."""


@dataclass(frozen=True)
class Held:
    """A model's shards, and the additional names of its tied parameters.

    Parameters
    ----------
    shards : list of Shard
    aliases : dict of str to str
        Maps each additional name to the shard's name.
    units : list of (Unit, str)
        A sharded model's units, each with its strategy's name; informational only.
    loaded : callable
        Called with the shards' names after all were read and verified.
    base_crc : callable, optional
        Returns a checksum of the parameters that are not among the shards; collective.
    """

    shards: list[Shard]
    aliases: dict[str, str]
    units: list[tuple[_core.Unit, str]]
    loaded: Callable[[Collection[str]], None] = _nothing
    base_crc: Callable[[], int] | None = None


@singledispatch
def shards_of(model: Any, write: bool) -> Held:
    """Return this rank's shards of a model's parameters and buffers.

    Parameters
    ----------
    model : Module
        Sharded or not.
    write : bool
        Whether the memory will be written to.
    """
    raise TypeError(
        f"'model' must be a module whose state a checkpoint can hold, got {type(model).__name__}; "
        "torch modules can be held once fsdpc.torch is imported"
    )


@shards_of.register
def _(model: Module, write: bool) -> Held:
    first_names: dict[int, str] = {}
    sharded = {id(m._fsdpc_unit): m for m in model.modules() if hasattr(m, "_fsdpc_unit")}
    for unit in (m._fsdpc_unit for m in sharded.values()):
        if prod(unit.mesh_shape) != distributed.world_size():
            raise NotImplementedError(
                f"a checkpoint of '{unit.name}', which {prod(unit.mesh_shape)} of all ranks share: "
                "files are of all ranks; save what full_tensor() gives the first rank of each group"
            )
    held = Held([], {}, [(m._fsdpc_unit, m._fsdpc_strategy) for m in sharded.values()])
    for name, t in model._persistent():
        if not isinstance(t, Parameter):
            held.shards.append(plain_shard(name, t))
        elif id(t) in first_names:
            held.aliases[name] = first_names[id(t)]
        else:
            first_names[id(t)] = name
            held.shards.append(parameter_shard(name, t, write))
    return held


RESIDUAL = "residual"


def residuals_of(held: Held) -> list[Shard]:
    """Return this rank's shards of what the units' sums keep for the next ones.

    Each tensor has a row per rank. Rows of codecs are in an array of hosts and their ranks, since
    on other hosts, the residuals are of other messages. Rows of PowerSGD are in an array of
    replicas and their shards. Counts of sums are the same on all ranks.
    """
    world, found = distributed.world(), []
    hosts = world.hosts, world.size // world.hosts
    for u, (unit, _) in enumerate(held.units):
        kept = [(f"{u}.{i}", hosts, memory) for i, memory in enumerate(unit.residuals)]
        if unit.low_rank is not None:
            name = f"{u}.powersgd{unit.low_rank[0]}"
            kept.append((name, unit.mesh_shape, unit.low_rank_state))
            found.append(plain_shard(f"{u}.sums.{RESIDUAL}", unit.low_rank_sums))
        for name, ranks, memory in kept:
            if memory is not None:
                n = memory.numel()
                place = f"{name}.{RESIDUAL}", (*ranks, n), world.rank * n, n
                found.append(Shard(*place, memory, 0))
    return found


def parameter_shard(name: str, p: Any, write: bool) -> Shard:
    """Return this rank's shard of a native parameter, which may belong to a unit."""
    if p._unit is None:
        if p.is_deferred:
            if not write:
                raise RuntimeError(
                    f"parameter '{name}' is deferred and has no values to save: call "
                    "fully_shard() or materialize() on the model first"
                )
            p.materialize_()
        shard = plain_shard(name, p.detach())
    else:
        shard = master_shard(name, p.shape, p._unit, p._index, write)
    return replace(shard, code=p._code, frozen=not p.requires_grad)


def master_shard(
    name: str, shape: Sequence[int], unit: _core.Unit, index: int, write: bool
) -> Shard:
    """Return this rank's rows of a unit's parameter, whose full shape is ``shape``."""
    memory, first, replica, _ = _core.master_shard(unit, index, write)
    return Shard(name, tuple(shape), first, memory.numel(), memory, replica, unit=unit.name)


def plain_shard(name: str, tensor: Tensor) -> Shard:
    """Return the shard of a tensor that every rank holds in full; rank 0 writes its copy."""
    count = tensor.numel()
    return Shard(name, tuple(tensor.shape), 0, count, tensor, distributed.rank())


class Saved:
    """A checkpoint's optimizer data: step counts by parameter, and tensor names.

    The names are "<parameter>.<state>".
    """

    def __init__(self, steps: Mapping[str, int], names: Iterable[str]) -> None:
        self.steps = steps
        self.states: dict[str, list[str]] = {}
        for name in names:
            parameter, _, state = name.rpartition(".")
            self.states.setdefault(parameter, []).append(state)


class StateAccess:
    """Access to the native optimizers' states, and the base class for other kinds of optimizers.

    Parameters
    ----------
    optimizer : Optimizer
        An optimizer over parameters of ``model``.
    model : Module
        The model, which names the parameters.
    """

    def __init__(self, optimizer: Any, model: Any) -> None:
        self.optimizer = optimizer
        self.names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
        self._converts: dict[int, dict[str, Tensor]] = {}  # values read in another format

    @property
    def kind(self) -> str:
        """The optimizer's class name; only a class with the same name can load the states."""
        return type(self.optimizer).__name__

    def steps(self, p: Any) -> int:
        """Return a parameter's step count; 0 means that it has no states."""
        return self.optimizer.step_count(p)

    def views(self, p: Any, wanted: Collection[str] | None) -> dict[str, Tensor]:
        """Return memory for this rank's rows of the states, creating missing states.

        Parameters
        ----------
        p : Parameter
        wanted : collection of str, optional
            The states in a checkpoint, if they will be read.
        """
        views = self.memory(p, write=wanted is not None)
        coded, saved = (any(map(formats.is_maxima, names)) for names in (views, wanted or ()))
        if wanted is None or coded == saved:
            return views
        read = self._converts[id(p)] = {}
        for name, view in views.items():
            if formats.is_maxima(name):
                continue
            read[name] = _core.zeros(view.shape, dtype=_core.uint8 if saved else _core.float32)
            if saved:
                blocks = formats.blocks_in(view.numel(), self.place(p)[0])
                read[name + formats.MAXIMA] = _core.zeros((blocks,))
        return read

    def memory(self, p: Any, write: bool) -> dict[str, Tensor]:
        """Return the memory of this rank's rows of the states, creating missing states."""
        return self.optimizer.state_views(p, write=write)

    def converts(self, p: Any) -> None:
        """Convert states that were read in another format than the optimizer's."""
        if read := self._converts.pop(id(p), None):
            shape = self.place(p)[0]
            views = self.memory(p, write=True)
            formats.write_rows(self.optimizer._codes(p), views, read, shape)

    def place(self, p: Any) -> tuple[tuple[int, ...], int, int]:
        """Return a parameter's full shape, and this rank's first element and replica index."""
        if p._unit is None:
            return tuple(p.shape), 0, distributed.rank()
        _, first, replica, _ = _core.master_shard(p._unit, p._index, False)
        return tuple(p.shape), first, replica

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's options as values that JSON supports."""
        return {key: value for key, value in group.items() if key != "params"}

    def apply(self, groups: list[dict[str, Any]], steps: Mapping[str, int]) -> None:
        """Set the options and step counts after the states have been read into memory.

        Parameters
        ----------
        groups : list of dict
            Results of :meth:`options`.
        steps : mapping of str to int
            Step counts by parameter.
        """
        for group, given in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in given.items():
                if key != "params":
                    self.set_option(group, key, tuple(value) if isinstance(value, list) else value)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                self.set_steps(p, steps[self.names[id(p)]])

    def set_option(self, group: dict[str, Any], key: str, value: Any) -> None:
        """Set one option."""
        group[key] = value

    def set_steps(self, p: Any, steps: int) -> None:
        """Set one step count."""
        self.converts(p)
        self.optimizer.set_step_count(p, steps)


@singledispatch
def access_of(optimizer: Any, model: Any) -> StateAccess:
    """Return the access object for an optimizer's states; parameter names come from the model."""
    raise TypeError(
        "'optimizer' must be an optimizer whose states a checkpoint can hold, got "
        f"{type(optimizer).__name__}; torch's can be held once fsdpc.torch is imported"
    )


access_of.register(Optimizer, StateAccess)


@dataclass(frozen=True)
class States:
    """An optimizer's states for parameters that have been stepped, and its other data."""

    shards: list[Shard]  # named "<parameter>.<state>"
    steps: dict[str, int]
    groups: list[dict[str, Any]]
    access: StateAccess


def states_of(optimizer: Any, model: Any, saved: Saved | None = None) -> States:
    """Return this rank's shards of an optimizer's states.

    Parameters
    ----------
    optimizer : Optimizer
        An optimizer over parameters of ``model``.
    model : Module
        The model, which names the parameters.
    saved : Saved, optional
        The states to read; by default those of the parameters that have stepped.
    """
    access = access_of(optimizer, model)
    found = States([], {}, [], access)
    for index, group in enumerate(optimizer.param_groups):
        params = []
        for i, p in enumerate(group["params"]):
            if id(p) not in access.names:
                raise ValueError(
                    f"parameter number {i} of group {index} of the optimizer is none of the "
                    "model's: a checkpoint names states by the model's parameters"
                )
            name = access.names[id(p)]
            params.append(name)
            steps = access.steps(p) if saved is None else saved.steps.get(name, 0)
            found.steps[name] = steps
            if steps > 0:
                found.shards.extend(_states(access, p, name, saved))
        found.groups.append({**access.options(group), "params": params})
    return found


def _states(access: StateAccess, p: Any, name: str, saved: Saved | None) -> list[Shard]:
    wanted = None if saved is None else saved.states.get(name, [])
    shape, first, replica = access.place(p)
    found = []
    for state, memory in access.views(p, wanted).items():
        place = shape, first
        if formats.is_maxima(state):
            place = (formats.blocks_in(prod(shape), shape),), formats.blocks_in(first, shape)
        if factored.is_mean(state):
            place = factored.place_of(state, shape, first)
        whole = factored.is_whole(state, shape)
        copy = distributed.rank() if whole else replica
        found.append(Shard(f"{name}.{state}", *place, memory.numel(), memory, copy))
    return found
