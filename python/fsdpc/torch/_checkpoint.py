"""The torch part of ``fsdpc.checkpoint``: modules, optimizers and random number generators.

The rows of a unit's parameters are the engine's masters, and are read and written like those of
native modules; ``_even_parts.py`` is for parameters that have no such rows. All other parameters
and all buffers are whole on every rank. Options that select an implementation (``foreach``,
``fused``) are not saved, so that the checkpoints of one frontend load in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc import _core, distributed
from fsdpc.checkpoint import generators
from fsdpc.checkpoint.shards import (
    Held,
    Shard,
    StateAccess,
    access_of,
    master_shard,
    plain_shard,
    shards_of,
)
from fsdpc.checkpoint.trained import Trained
from fsdpc.optim import factored
from fsdpc.torch import _device
from fsdpc.torch._dtensor import gathered
from fsdpc.torch._even_parts import (
    empty_part,
    first_of,
    full_of,
    is_consecutive,
    part_of,
)
from fsdpc.torch._flat_optimizer import FlatOptimizer
from fsdpc.torch._grads import other_comms
from fsdpc.torch._param_layout import local_of
from fsdpc.torch._subclasses import InnerTensors, kind_of, take_codes_back
from fsdpc.torch._unit import ShardInfo, UnitState, full_value, states_of
from fsdpc.torch.state_dict import local_state_dict

_HOW = {
    "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "param_names",
}  # fmt: skip


def _units(model: nn.Module) -> dict[int, tuple[UnitState, int]]:
    """Map the ``id()`` of each sharded and unsharded parameter to its unit and index."""
    _device.join()
    found: dict[int, tuple[UnitState, int]] = {}
    states = states_of(model)
    others = prod(
        comm.size for comm in other_comms((s, i) for s in states for i in range(len(s.params)))
    )
    for state in states:
        ranks = prod(comm.size for comm in state.comms)
        world = distributed.world_size() if distributed.is_initialized() else 0
        if world not in (ranks, ranks * others):
            raise NotImplementedError(
                f"a checkpoint of '{state.unit.name}', which {ranks} of all ranks share: files are "
                "of all ranks; save what get_model_state_dict(model, rank0_only=True) and "
                "get_optimizer_state_dict give rank 0 of each group"
            )
        if state.summoned:
            raise RuntimeError(
                f"a checkpoint inside summon_full_params() of '{state.unit.name}': leave it first, "
                "so that what was written there counts"
            )
        state.torch_unit.follow()
        for i, param in enumerate(state.params):
            found[id(param)] = state, i
        for i, full in enumerate(state.unsharded):
            found[id(full)] = state, i
    return found


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by ``state_dict()`` name; tied tensors have several names."""
    named = local_state_dict(model, keep_vars=True)
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    found = {name: value for name, value in named.items() if id(value) in known}
    for name, value in named.items():
        if name not in found and not _goes_with_codes(name, named):
            raise TypeError(
                f"'{name}' of state_dict() is neither a parameter nor a buffer but a "
                f"{type(value).__name__}: a checkpoint has no place for it"
            )
    return found


def _goes_with_codes(name: str, named: Mapping[str, Any]) -> bool:
    """Return whether bitsandbytes saves this next to the codes of a weight."""
    owner = name.removesuffix("SCB") if name.endswith("SCB") else name.rpartition("weight")[0]
    weight = named.get(f"{owner}weight")
    return hasattr(weight, "quant_state") or hasattr(weight, "SCB")


@shards_of.register
def _(model: nn.Module, write: bool) -> Held:
    units = _units(model)
    take_codes_back([model])
    named = _tensors(model)
    first_names: dict[int, str] = {}
    shards: list[Shard] = []
    aliases: dict[str, str] = {}
    parts: dict[str, torch.Tensor] = {}
    fills: dict[str, Callable[[], None]] = {}  # copies of what subclasses hold
    for name, t in named.items():
        if id(t) in first_names:
            aliases[name] = first_names[id(t)]
            continue
        first_names[id(t)] = name
        p, kind = t, None
        if id(t) in units:
            state, i = units[id(t)]
            p, kind = state.params[i], state.layouts[i].kind
            made = _shard if is_consecutive(state, i) else partial(_part_shard, parts=parts)
            shard = made(name, state, i, write)
        else:
            if isinstance(t, DTensor):
                raise TypeError(
                    f"'{name}' is a DTensor of no unit of this {type(model).__name__}: save the "
                    "module that was given to fully_shard()"
                )
            kind = kind_of(name, t)
            stored = t if kind is None else kind.plain(t)
            if isinstance(kind, InnerTensors):
                fills[name] = partial(kind.fill, t, stored)
            shard = plain_shard(name, _memory(name, stored))
        frozen = isinstance(p, nn.Parameter) and not p.requires_grad
        code = kind.code(p) if kind else None
        shards.append(replace(shard, code=code, exact=code is not None, frozen=frozen))
        for key, scales in kind.scales(p).items() if kind else ():
            part = f"{name}.{key}"
            shard = plain_shard(part, _memory(part, scales))
            shards.append(replace(shard, exact=True, frozen=frozen))

    def loaded(names: Collection[str]) -> None:
        for name in named:
            if name not in names:
                continue
            torch.autograd.graph.increment_version(named[name])
            if name in parts:
                state, i = units[id(named[name])]
                state.write(i, full_of(parts[name], state.shapes[i]))
            elif id(named[name]) in units:
                state, i = units[id(named[name])]
                state.trust(i)
            elif name in fills:
                fills[name]()

    sharded = [(state.unit, state.recipe.where.strategy) for state in states_of(model)]
    return Held(shards, aliases, sharded, loaded)


def _check_values(name: str, state: UnitState, i: int, write: bool) -> None:
    if i in state.missing and not write:
        raise RuntimeError(
            f"parameter '{name}' was on the meta device and has no values to save yet: load "
            "them, or initialise them inside summon_full_params()"
        )


def _shard(name: str, state: UnitState, i: int, write: bool) -> Shard:
    _check_values(name, state, i, write)
    return master_shard(name, state.shapes[i], state.unit, i, write)


def _part_shard(
    name: str, state: UnitState, i: int, write: bool, parts: dict[str, torch.Tensor]
) -> Shard:
    """Return the shard of an even part, which is added to ``parts``; collective."""
    _check_values(name, state, i, write)
    shape = state.shapes[i]
    part = empty_part(shape, state.dtypes[i]) if write else part_of(full_value(state, i))
    parts[name] = part
    return Shard(name, tuple(shape), first_of(shape), part.numel(), _memory(name, part), 0)


def _memory(name: str, t: torch.Tensor) -> _core.Tensor:
    """Wrap a torch tensor's memory in an engine tensor."""
    if t.device != _device.home():
        raise TypeError(
            f"'{name}' is on {t.device}: checkpoints hold tensors of {_device.home()}, where the "
            "engine computes"
        )
    if not t.is_contiguous():
        raise TypeError(f"'{name}' is not contiguous: make it so with contiguous() first")
    try:
        return _device.to_engine(t.detach())
    except (TypeError, ValueError, NotImplementedError, BufferError) as error:
        raise TypeError(f"'{name}' is {t.dtype}: {error}") from None


class _Access(StateAccess):
    """Code shared by the two classes that access optimizer states."""

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        self.optimizer = optimizer
        self._converts = {}
        self.parts: dict[int, dict[str, torch.Tensor]] = {}
        model = model.model if isinstance(model, Trained) else model
        units = _units(model)
        self.names = {}
        for name, t in _tensors(model).items():
            self.names.setdefault(id(t), name)
            if id(t) in units:  # an optimizer holds the sharded parameter at any time
                state, i = units[id(t)]
                self.names.setdefault(id(state.params[i]), name)

    def place(self, p: Any) -> tuple[tuple[int, ...], int, int]:
        info = getattr(p, "fsdpc", None)
        if not isinstance(info, ShardInfo):
            return tuple(p.shape), 0, distributed.rank()
        if self.has_parts(p):
            return tuple(info.shape), first_of(info.shape), 0
        _, first, replica, _ = _core.master_shard(info.unit, info._index, False)
        return tuple(info.shape), first, replica

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: float(value) if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params" and key not in _HOW
        }

    def set_option(self, group: dict[str, Any], key: str, value: Any) -> None:
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value

    def even_parts(
        self, p: Any, states: Mapping[str, torch.Tensor], wanted: Collection[str] | None
    ) -> dict[str, _core.Tensor]:
        """Return even parts of a parameter's states, which :meth:`rows` turns back; collective."""
        home = p.fsdpc._state, p.fsdpc._index
        parts = {}
        for key, value in states.items():
            if wanted is None:
                parts[key] = part_of(gathered(value, *home))  # type: ignore[arg-type]
            else:
                parts[key] = empty_part(p.fsdpc.shape, value.dtype)
        self.parts[id(p)] = parts
        return {key: _memory(f"{self.names[id(p)]}.{key}", t) for key, t in parts.items()}

    def rows(self, p: Any) -> dict[str, torch.Tensor]:
        """Return this rank's rows of the states whose even parts were read; collective."""
        info = p.fsdpc
        return {
            key: info._state.own_rows(info._index, full_of(part, info.shape))
            for key, part in self.parts.pop(id(p), {}).items()
        }

    @staticmethod
    def has_parts(p: Any) -> bool:
        """Return whether the states of a parameter are read and written as even parts."""
        info = getattr(p, "fsdpc", None)
        return isinstance(info, ShardInfo) and not is_consecutive(info._state, info._index)


class _FlatAccess(_Access):
    """The engine's optimizers."""

    def steps(self, p: Any) -> int:
        return self.optimizer._core.step_count(p.fsdpc.unit, p.fsdpc._index)

    def views(self, p: Any, wanted: Collection[str] | None) -> dict[str, _core.Tensor]:
        self.optimizer._core.make_states(p.fsdpc.unit, p.fsdpc._index)
        if self.has_parts(p):
            states = self.optimizer.state_tensors(p)
            if any(map(factored.is_mean, states)):
                raise NotImplementedError(
                    f"a checkpoint of the means by row and column of '{self.names[id(p)]}', whose "
                    "mesh also has tensor parallelism: save what get_optimizer_state_dict() returns"
                )
            return self.even_parts(p, states, wanted)
        return super().views(p, wanted)

    def memory(self, p: Any, write: bool) -> dict[str, _core.Tensor]:
        return self.optimizer.state_rows(p, write)

    def set_steps(self, p: Any, steps: int) -> None:
        self.converts(p)
        if rows := self.rows(p) if self.has_parts(p) else None:
            self.optimizer.set_shard_state(p, rows)
        self.optimizer._core.set_step_count(p.fsdpc.unit, p.fsdpc._index, steps)


class _TorchAccess(_Access):
    """Access to torch's own elementwise optimizers, whose parameters may be sharded.

    If an optimizer does not count its steps (SGD), the checkpoint records one step if states exist.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        super().__init__(optimizer, model)
        self.made: dict[int, dict[str, torch.Tensor]] = {}

    def steps(self, p: Any) -> int:
        state = self.optimizer.state.get(p, {})
        return int(state["step"]) if "step" in state else int(bool(self._rows(p)))

    def _rows(self, p: Any) -> dict[str, torch.Tensor]:
        rows = {}
        for key, value in self.optimizer.state.get(p, {}).items():
            if key == "step" or value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.shape != p.shape:
                raise TypeError(
                    f"{self.kind} keeps '{key}' of '{self.names[id(p)]}', which is not element by "
                    "element of the parameter: a checkpoint has no place for it"
                )
            rows[key] = local_of(value)
        return rows

    def views(self, p: Any, wanted: Collection[str] | None) -> dict[str, _core.Tensor]:
        rows = self._rows(p)
        if self.has_parts(p):
            states = self.optimizer.state.get(p, {})
            held = dict.fromkeys(wanted, p) if wanted is not None else {k: states[k] for k in rows}
            return self.even_parts(p, held, wanted)
        if wanted is not None:
            self.made[id(p)] = {key: torch.zeros_like(p).detach() for key in wanted}
            rows = {key: local_of(value) for key, value in self.made[id(p)].items()}
        name = self.names[id(p)]
        return {key: _memory(f"{name}.{key}", value) for key, value in rows.items()}

    def set_steps(self, p: Any, steps: int) -> None:
        if steps == 0:
            self.optimizer.state.pop(p, None)
            return
        state: dict[str, Any] = dict(self.made.get(id(p), {}))
        for key, rows in self.rows(p).items() if self.has_parts(p) else ():
            state[key] = p.fsdpc._state.wrap(p.fsdpc._index, rows.clone())
        if self.kind != "SGD":
            state["step"] = torch.tensor(float(steps))
        self.optimizer.state[p] = state


access_of.register(torch.optim.Optimizer, _TorchAccess)
access_of.register(FlatOptimizer, _FlatAccess)


def _generator() -> str:
    return generators.words(torch.get_rng_state().numpy())


def _set_generator(text: str) -> None:
    torch.set_rng_state(torch.from_numpy(generators.from_words(text, np.uint8)))


def _gpu_generator() -> str | None:
    if not torch.cuda.is_initialized():
        return None
    return generators.words(torch.cuda.get_rng_state().numpy())


def _set_gpu_generator(text: str) -> None:
    if torch.cuda.is_available():  # checkpoints saved on a GPU also load elsewhere
        torch.cuda.set_rng_state(torch.from_numpy(generators.from_words(text, np.uint8)))


generators.register("torch", _generator, _set_generator)
generators.register("torch.cuda", _gpu_generator, _set_gpu_generator)
