"""Save and load state dicts of sharded torch models as full tensors.

``model.state_dict()`` returns DTensors. ``load_state_dict`` accepts them and full tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdpc.torch import _device, _shards
from fsdpc.torch._unit import (
    UnitState,
    check_same_ranks,
    full_value,
    on_copies,
    states_of,
)
from fsdpc.torch._unsharded import set_version


class _Option:
    """Counts open summon contexts, so that nested calls do not gather again."""

    depth = 0


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Replace each parameter with a private full copy in its original dtype; collective.

    Parameters
    ----------
    module : nn.Module
        A module whose units, including those of submodules, are gathered.
    recurse : bool, default True
        If False, gather only this module's own unit.
    writeback : bool, default True
        On exit, each rank keeps its own rows of the modified copies, except after an exception.
    rank0_only : bool, default False
        Other ranks keep their shards; needs ``writeback=False``.
    offload_to_cpu : bool, default False
        Accepted for compatibility: copies stay on the units' device.
    with_grads : bool, default False
        Give the copies full gradients; ``writeback`` then also keeps each rank's rows of these.

    Notes
    -----
    Inside, modules can be called without gradients: they compute with the copies and do not
    communicate, so rank 0 can generate by itself. Units that ``recurse=False`` excludes work as
    usual.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import fully_shard, summon_full_params
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> with summon_full_params(model), torch.no_grad():
    ...     x = model.bias.zero_()
    >>> with summon_full_params(model):
    ...     print(model.bias.tolist())
    [0.0, 0.0]
    """
    if rank0_only and writeback:
        raise ValueError("rank0_only with writeback=True: other ranks would keep the old rows")
    states = states_of(module) if recurse else [module._fsdpc_state]  # type: ignore[list-item]
    for state in states:
        if state.is_running:
            raise RuntimeError(f"summon_full_params inside forward or backward: {state.unit.name}")
    mine = not rank0_only or not states or _rank(states) == 0
    states = [s for s in states if not s.summoned]
    copies: list[list[nn.Parameter]] = []
    for s in states:
        copies.append([] if mine else s.params)
        for i, p in enumerate(s.params):
            value = full_value(s, i)
            grad = full_grad(p) if with_grads else None
            if mine:
                copies[-1].append(s.copy_of(i, value))
                copies[-1][-1].grad = grad
    with on_copies(states, copies) as now:
        yield
        for s, values in zip(states, now(), strict=True) if writeback else ():
            for i, full in enumerate(values):
                s.write(i, full)
                if with_grads:
                    _write_grad(s, i, full.grad)


def _write_grad(state: UnitState, index: int, full: torch.Tensor | None) -> None:
    """Store this rank's rows of a full gradient, or remove the gradient if it is None."""
    grad = state.params[index].grad
    if full is None or grad is None:
        state.params[index].grad = None
        return
    with torch.no_grad():
        grad.copy_(state.wrap(index, state.own_rows(index, full)))


def _rank(states: list[UnitState]) -> int:
    check_same_ranks(states, "rank0_only (rank 0 has no other ranks' experts; leave it out)")
    return max(comm.rank for comm in states[0].comms)


def full_grad(p: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's full averaged gradient, or None; collective if it is sharded.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import full_grad, fully_shard
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> full_grad(model.bias).tolist()
    [1.0, 1.0]
    """
    info = getattr(p, "fsdpc", None)
    if p.grad is None or info is None:
        return p.grad
    info._state.torch_unit.take_grads(info._index)
    return _device.gathered(info._state, info._index, True)


def module_state_dict(module: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """Return full tensors from a sharded module's ``state_dict``, as FSDP1 does; collective."""
    if _Option.depth:
        return call(*args, **kwargs)
    _Option.depth += 1
    try:
        with summon_full_params(module, writeback=False):
            return call(*args, **kwargs)
    finally:
        _Option.depth -= 1


def local_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the sharded parameters by name, without copies."""
    _Option.depth += 1
    try:
        return nn.Module.state_dict(module, *args, **kwargs)
    finally:
        _Option.depth -= 1


def _check_real(name: str, value: Any, p: torch.Tensor) -> None:
    """Raise if loading a value would discard its imaginary part."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        raise TypeError(
            f"the state dict has {value.dtype} for '{name}', which is {p.dtype}: give it "
            "value.real, if that is meant"
        )


def accept_full(state: UnitState, modules: list[nn.Module]) -> None:
    """Let the modules that hold a unit's parameters load full tensors and any DTensors."""
    owned: dict[int, dict[str, int]] = {}
    for owner, key, i in state.slots:
        owned.setdefault(id(owner), {})[key] = i
    for module in modules:
        if places := owned.get(id(module._parameters)):
            module._register_load_state_dict_pre_hook(partial(_take, state, places))
            if any(hasattr(state.params[i], "quant_state") for i in places.values()):
                module._register_state_dict_hook(partial(_drop_scales, state, places))


def _drop_scales(
    state: UnitState, places: Mapping[str, int], _: nn.Module, given: Any, prefix: str, __: Any
) -> None:
    """Remove what bitsandbytes saves next to its codes, which no module loads, as FSDP2 does.

    torch's ``get_model_state_dict`` and ``set_model_state_dict`` fail with such names.
    :func:`get_model_state_dict` and state dicts inside :func:`summon_full_params` keep them.
    """
    if not (_Option.depth or state.summoned):
        for name in [n for n in given for key in places if n.startswith(f"{prefix}{key}.")]:
            del given[name]


def _take(
    state: UnitState, places: dict[str, int], given: Any, prefix: str, options: Any, *_: Any
) -> None:
    """Write this rank's rows, then let torch check each parameter's new values."""
    if state.summoned:
        return
    assigns = options.get("assign_to_params_buffers", False)
    for key, i in places.items():
        name, param = prefix + key, state.params[i]
        value = given.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        _check_real(name, value, param)
        if value.shape != param.shape:
            continue
        if value.is_meta:
            raise NotImplementedError(f"'{name}' of the state dict is on the meta device")
        if assigns and value.dtype is not param.dtype:
            raise RuntimeError(
                f"load_state_dict(assign=True): '{name}' is {value.dtype}, and the unit "
                f"'{state.unit.name}' holds it in {param.dtype}: convert the state dict, or the "
                "module before fully_shard()"
            )
        state.torch_unit.follow(i)
        with torch.no_grad():
            state.rows[i].copy_(_shards.local(param, value.detach()))
        state.trust(i)
        given[name] = param if assigns else param.detach()


def get_model_state_dict(
    model: nn.Module, *, rank0_only: bool = False, sharded: bool = False
) -> dict[str, torch.Tensor]:
    """Return full parameters and buffers by name; collective.

    Parameters
    ----------
    model : nn.Module
    rank0_only : bool, default False
        Other ranks take part and get an empty dict; they store one full tensor at a time.
    sharded : bool, default False
        Return the parameters' DTensors instead, without copies or communication.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import fully_shard, get_model_state_dict
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> {name: tuple(value.shape) for name, value in get_model_state_dict(model).items()}
    {'weight': (2, 4), 'bias': (2,)}
    """
    if sharded:
        for s in states_of(model):
            s.torch_unit.follow()
        named = local_state_dict(model, keep_vars=True)
        return {name: t.detach() if torch.is_tensor(t) else t for name, t in named.items()}
    keep = True
    units = states_of(model)
    if rank0_only and units:
        keep = _rank(units) == 0
    result: dict[str, torch.Tensor] = {}
    values: dict[int, torch.Tensor] = {}
    for s in units:
        for i, p in enumerate(s.params):
            value = full_value(s, i)
            if keep:
                values[id(p)] = value
    if not keep:
        return result
    _Option.depth += 1
    try:
        for name, value in model.state_dict(keep_vars=True).items():
            result[name] = values.get(id(value), value.detach())
    finally:
        _Option.depth -= 1
    return result


def set_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
    rank0_only: bool = False,
) -> Any:
    """Load full tensors by name; each rank keeps its own rows.

    Parameters
    ----------
    model : nn.Module
    state_dict : mapping of str to Tensor
        The same on every rank.
    strict : bool, default True
        Raise if names differ.
    rank0_only : bool, default False
        Use rank 0's tensors, broadcast one at a time, and ignore other ranks' tensors. Collective.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import fully_shard, get_model_state_dict, set_model_state_dict
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> state = get_model_state_dict(model)
    >>> set_model_state_dict(model, {n: torch.zeros_like(v) for n, v in state.items()})
    <All keys matched successfully>
    >>> model(torch.ones(1, 4)).tolist()
    [[0.0, 0.0]]
    """
    if not rank0_only:
        return model.load_state_dict(state_dict, strict=strict)
    units = states_of(model)
    if not units:
        raise ValueError(f"rank0_only: {type(model).__name__} is not sharded")
    own = local_state_dict(model, keep_vars=True)
    places = {id(p): (s, i) for s in units for i, p in enumerate(s.params)}
    shapes = [t.shape for t in own.values()]
    found = _check_names(units, own, shapes, state_dict, strict)
    for k, (name, here) in enumerate(own.items()):
        if not found[k]:
            continue
        value = torch.empty(shapes[k], dtype=here.dtype, device=_device.home())
        if _rank(units) == 0:
            value.copy_(state_dict[name])
        _broadcast(units[0], value)
        if id(here) in places:
            state, index = places[id(here)]
            state.write(index, value)
        else:
            with torch.no_grad():
                here.copy_(value)
    return None


def _broadcast(
    state: UnitState, value: torch.Tensor, comms: Sequence[Any] | None = None
) -> None:
    """Broadcast rank 0's value to every rank of the communicators, by default all, as bytes."""
    if value.numel():
        flat = _device.to_engine(value.detach().reshape(-1).view(torch.uint8))
        for comm in reversed(state.comms if comms is None else comms):
            comm.broadcast(flat, 0)


def sync_buffers(state: UnitState, buffers: Sequence[torch.Tensor]) -> None:
    """Broadcast rank 0's buffers to the ranks that share gradients, per dtype and device.

    The buffers' version counters do not change, as with torch's DDP, because a pending backward may
    have saved the buffers.
    """
    comms = state.comms[: 1 if state.unit.apart else None]
    if all(comm.size == 1 for comm in comms):
        return
    alike: dict[Any, list[torch.Tensor]] = {}
    for buffer in buffers:
        alike.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for same in alike.values():
        flat = torch.cat([b.detach().reshape(-1) for b in same]).to(_device.home())
        _broadcast(state, flat, comms)
        if max(comm.rank for comm in comms) != 0:
            values = flat.to(same[0].device).split([b.numel() for b in same])
            versions = tuple(b._version for b in same)
            with torch.no_grad():
                for buffer, value in zip(same, values, strict=True):
                    buffer.copy_(value.view_as(buffer))
            set_version(tuple(same), versions)


_FITS, _MISSING, _OTHER = 1, 0, 2


def _check_names(
    units: list[UnitState],
    own: dict[str, Any],
    shapes: list[torch.Size],
    state_dict: Mapping[str, Any],
    strict: bool,
) -> list[bool]:
    """Return which of the model's tensors rank 0 provides; all ranks raise the same error."""
    marks = torch.zeros(len(own) + 1, dtype=torch.uint8, device=_device.home())
    if _rank(units) == 0:
        for k, ((name, here), shape) in enumerate(zip(own.items(), shapes, strict=True)):
            value = state_dict.get(name)
            if value is not None:
                real = here.is_complex() or not value.is_complex()
                marks[k] = _FITS if value.shape == shape and real else _OTHER
        marks[-1] = bool(set(state_dict) - set(own))
    _broadcast(units[0], marks)
    *found, extra = marks.tolist()
    names = list(own)
    other = [names[k] for k, mark in enumerate(found) if mark == _OTHER]
    missing = [names[k] for k, mark in enumerate(found) if mark == _MISSING]
    if other or (strict and (missing or extra)):
        unexpected = sorted(set(state_dict) - set(own))[:5] if _rank(units) == 0 else "on rank 0"
        raise RuntimeError(
            f"rank 0's state dict does not fit: missing {missing[:5]}, of other shapes "
            f"or complex {other[:5]}, unexpected {unexpected if extra else []}"
        )
    return [mark == _FITS for mark in found]
