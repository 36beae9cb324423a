"""What a rank holds of a model and an optimizer, as pieces of named tensors.

This is all that saving and loading know of front doors: another one registers its own functions
with ``pieces_of.register`` and ``states_of.register``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from math import prod
from typing import Any

from fsdpc import _core, distributed
from fsdpc._core import Tensor
from fsdpc.nn.module import Module

# Names of dtypes in files.
FILE_DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}
FLOATS = {"F32", "BF16", "F16", "F64"}


@dataclass(frozen=True)
class Piece:
    """A run of elements of one tensor, with the memory it stands in.

    Parameters
    ----------
    name : str
        As in ``state_dict()``.
    shape : tuple of int
        Of the whole tensor.
    first, numel : int
        This rank's elements of it.
    memory : Tensor
        Those elements, and nothing else; written when loading.
    replica : int
        Several ranks may hold the same elements: which of these copies this one is. Number 0 is
        written; the ranks with the same number hold one whole copy together.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    numel: int
    memory: Tensor
    replica: int

    @property
    def dtype(self) -> str:
        """The dtype as files name it."""
        return FILE_DTYPES[self.memory.dtype.name]

    @property
    def total(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Held:
    """The pieces of a model, and other names that its tied parameters go by."""

    pieces: list[Piece]
    aliases: dict[str, str]


@singledispatch
def pieces_of(model: Any, write: bool) -> Held:
    """Return this rank's pieces of a model's parameters and buffers.

    Parameters
    ----------
    model : Module
        Sharded or not.
    write : bool
        Whether the memory will be written.
    """
    raise TypeError(
        f"'model' must be a module whose state a checkpoint can hold, got {type(model).__name__}"
    )


@pieces_of.register
def _(model: Module, write: bool) -> Held:
    first_names: dict[int, str] = {}
    held = Held([], {})
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, p in module._parameters.items():
            if p is None:
                continue
            if id(p) in first_names:
                held.aliases[prefix + name] = first_names[id(p)]
                continue
            first_names[id(p)] = prefix + name
            held.pieces.append(_parameter(prefix + name, p, write))
        transient = module.__dict__.get("_transient", ())
        for name, b in module._buffers.items():
            if b is not None and name not in transient:
                held.pieces.append(_plain(prefix + name, b))
    return held


def _parameter(name: str, p: Any, write: bool) -> Piece:
    if p._unit is None:
        if p.is_deferred:
            if not write:
                raise RuntimeError(
                    f"parameter '{name}' is deferred and has no values to save: call "
                    "fully_shard() or materialize() on the model first"
                )
            p.materialize_()
        return _plain(name, p.detach())
    memory, first, replica, _ = _core.master_piece(p._unit, p._index, write)
    return Piece(name, tuple(p.shape), first, memory.numel(), memory, replica)


def _plain(name: str, tensor: Tensor) -> Piece:
    """A tensor that every rank has as a whole; rank 0 writes its own."""
    count = tensor.numel()
    return Piece(name, tuple(tensor.shape), 0, count, tensor, distributed.rank())


def names_of(model: Any) -> dict[int, str]:
    """Return the name of each parameter by the identity of its object."""
    return {id(p): name for name, p in model.named_parameters()}


@dataclass(frozen=True)
class States:
    """An optimizer's states of the parameters that have stepped, and what else it is made of."""

    pieces: list[Piece]  # named "<parameter>.<state>"
    steps: dict[str, int]
    groups: list[dict[str, Any]]
    kind: str


def states_of(optimizer: Any, model: Any, stepped: Mapping[str, int] | None = None) -> States:
    """Return this rank's pieces of an optimizer's states.

    Parameters
    ----------
    optimizer : Optimizer
        Over parameters of ``model``.
    model : Module
        Names the parameters.
    stepped : mapping of str to int, optional
        Parameters whose states are wanted; without it those that have stepped.
    """
    names = names_of(model)
    found = States([], {}, [], type(optimizer).__name__)
    for index, group in enumerate(optimizer.param_groups):
        params = []
        for i, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"parameter number {i} of group {index} of the optimizer is none of the "
                    "model's: a checkpoint names states by the model's parameters"
                )
            params.append(names[id(p)])
            steps = optimizer.step_count(p) if stepped is None else stepped.get(params[-1], 0)
            found.steps[params[-1]] = steps
            if steps > 0:
                found.pieces.extend(_states(optimizer, p, params[-1]))
        options = {key: value for key, value in group.items() if key != "params"}
        found.groups.append({**options, "params": params})
    return found


def _states(optimizer: Any, p: Any, name: str) -> list[Piece]:
    first, replica = 0, distributed.rank()
    if p._unit is not None:
        _, first, replica, _ = _core.master_piece(p._unit, p._index, False)
    return [
        Piece(f"{name}.{state}", tuple(p.shape), first, memory.numel(), memory, replica)
        for state, memory in optimizer.state_views(p).items()
    ]
