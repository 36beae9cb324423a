"""Get and set optimizer states of sharded models as full tensors by name, for any optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc.torch import _device, _shards
from fsdpc.torch._shards import params_of
from fsdpc.torch._unit import UnitState, states_of
from fsdpc.torch.state_dict import _broadcast, _rank

_WRAPPER = "_checkpoint_wrapped_module."  # torch's prefix, which its state dicts omit too


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name.replace(_WRAPPER, "") for name, p in model.named_parameters()}


def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank0_only: bool = False,
    sharded: bool = False,
) -> dict[str, Any]:
    """Return an optimizer's states as full tensors by parameter name; collective.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
        An optimizer over the model's parameters, from ``torch.optim`` or ``fsdpc.torch.optim``.
    rank0_only : bool, default False
        Other ranks take part and get an empty dict.
    sharded : bool, default False
        Return copies as DTensors instead, which ``torch.distributed.checkpoint`` saves, and loads
        at any number of ranks. An optimizer that has not stepped creates its states in a step with
        zero gradients and learning rate 0, as in torch's function of this name.
        :func:`set_optimizer_state_dict` loads them.

    Returns
    -------
    dict
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import fully_shard, get_optimizer_state_dict
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> optimizer.step()
    >>> state = get_optimizer_state_dict(model, optimizer)["state"]
    >>> sorted(state), tuple(state["weight"]["exp_avg"].shape)
    (['bias', 'weight'], (2, 4))
    """
    if sharded:
        make_states(optimizer)
        return local_optimizer_state_dict(model, optimizer)

    def full(p: Any, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value.clone()
        whole = value.full_tensor()
        return whole.clone() if whole.data_ptr() == value._local_tensor.data_ptr() else whole

    found = _by_name(model, optimizer, full)
    units = [p.fsdpc._state for p in params_of(optimizer) if hasattr(p, "fsdpc")]
    return {} if rank0_only and units and _rank(units) != 0 else found


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create an optimizer's states, unless it has some or any parameter has a gradient."""
    groups = optimizer.param_groups
    params = [p for p in params_of(optimizer) if p.requires_grad]
    if optimizer.state or any(p.grad is not None for p in params):
        return
    rates = [group.get("lr") for group in groups]
    with torch.no_grad():
        for p in params:
            p.grad = torch.zeros_like(p)
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    optimizer.zero_grad()


def _by_name(
    model: nn.Module, optimizer: Any, change: Callable[[Any, torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Return states and groups by parameter name, after applying ``change`` to each tensor."""
    names = _names(model)
    groups = [
        {**g, "params": [_name_of(names, p) for p in g["params"]]} for g in optimizer.param_groups
    ]
    states = {}
    for p in params_of(optimizer):
        values = _state_of(optimizer, p).items()
        states[names[id(p)]] = {
            k: change(p, v) if isinstance(v, torch.Tensor) else v for k, v in values
        }
    return {"state": {n: s for n, s in states.items() if s}, "param_groups": groups}


def set_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load a :func:`get_optimizer_state_dict` result; each rank keeps its own rows.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
        It must have the same parameters in the same groups.
    state_dict : mapping
        The same on every rank; the world size may differ from that at the time of saving.

    Raises
    ------
    KeyError
        A parameter of the optimizer is missing from the groups.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> optimizer.step()
    >>> state = get_optimizer_state_dict(model, optimizer)
    >>> fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
    >>> set_optimizer_state_dict(model, fresh, state)
    >>> fresh.param_groups[0]["lr"]
    0.1
    """
    names = _names(model)
    given = {name for g in state_dict["param_groups"] for name in g["params"]}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
        for p in group["params"]:
            name = _name_of(names, p)
            if name not in given:
                raise KeyError(f"no optimizer state for parameter '{name}': other names were saved")
            values = state_dict["state"].get(name, {})
            _set_state(optimizer, p, {key: _own(p, key, value) for key, value in values.items()})


def _own(p: Any, key: str, value: Any) -> Any:
    """Return this rank's part of a parameter's state: rows of a full tensor, otherwise a copy."""
    if not isinstance(value, torch.Tensor):
        return value
    info = getattr(p, "fsdpc", None)
    if info is None or not value.dim() or value.shape != info.shape:
        return value.clone()
    _shards.check(p, key, value)
    return info._state.wrap(info._index, _shards.local(p, value.detach()).clone())


class Saved:
    """Gives the result of ``optimizer.state_dict()`` the interface for reading an optimizer.

    Indices refer to the parameters of ``optimizer``, in order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        states = state_dict["state"]
        self._states = {id(p): states.get(i, {}) for i, p in enumerate(params_of(optimizer))}
        self.param_groups: list[dict[str, Any]] = [
            {**saved, "params": group["params"]}
            for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
        ]

    def shard_state(self, p: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states."""
        return self._states[id(p)]


def local_optimizer_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return copies of the states as they are, DTensors, by parameter name."""
    return _by_name(model, optimizer, lambda p, value: value.clone())


def to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """Convert states by name to this rank's part of them, for ``optimizer.load_state_dict``.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
    state_dict : mapping
        Full states, or this rank's rows of them.
    rank0_only : bool, default False
        Use rank 0's states, sent one tensor at a time; collective in this case.

    Raises
    ------
    KeyError
        The optimizer has no parameter for a saved name.
    """
    names = _names(model)
    order = params_of(optimizer)
    at = {_name_of(names, p): i for i, p in enumerate(order)}

    def index(name: str) -> int:
        if name not in at:
            raise KeyError(f"the optimizer has no parameter '{name}' for the state that was saved")
        return at[name]

    units = states_of(model)
    if rank0_only and units:
        groups, values = _from_rank_0(state_dict, units)
    elif state_dict is None:
        raise ValueError("no states: only rank 0 may have none, with rank0_only")
    else:
        groups = state_dict["param_groups"]
        values = ((n, k, v) for n, s in state_dict["state"].items() for k, v in s.items())
    states: dict[int, dict[str, Any]] = {}
    for name, key, value in values:
        i = index(name)
        states.setdefault(i, {})[key] = _own(order[i], key, value)
    numbered = [{**g, "params": [index(name) for name in g["params"]]} for g in groups]
    return {"state": states, "param_groups": numbered}


def _from_rank_0(
    state_dict: Mapping[str, Any] | None, units: list[UnitState]
) -> tuple[list[dict[str, Any]], Iterator[tuple[str, str, Any]]]:
    """Return rank 0's groups, and an iterator that receives its values one by one."""
    text = b""
    rank = _rank(units)
    if rank == 0:
        if not state_dict:
            raise ValueError("no states on rank 0, whose states are to be loaded")
        shapes = [
            (name, key, [str(v.dtype)[6:], list(v.shape)] if isinstance(v, torch.Tensor) else v)
            for name, values in state_dict["state"].items()
            for key, v in values.items()
        ]
        text = json.dumps([state_dict["param_groups"], shapes], default=float).encode()
    home = _device.home()
    length = torch.tensor([len(text)], device=home)
    _broadcast(units[0], length)
    data = torch.zeros(int(length), dtype=torch.uint8, device=home)
    if text:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(home)
    _broadcast(units[0], data)
    groups, shapes = json.loads(data.cpu().numpy().tobytes())
    for group in groups:
        for key, value in group.items():
            if isinstance(value, list) and key != "params":
                group[key] = tuple(value)

    def values() -> Iterator[tuple[str, str, Any]]:
        for name, key, what in shapes:
            if not isinstance(what, list):
                yield name, key, what
                continue
            value = torch.empty(what[1], dtype=getattr(torch, what[0]), device=home)
            if rank == 0 and state_dict is not None:
                value.copy_(state_dict["state"][name][key])
            _broadcast(units[0], value)
            yield name, key, value

    return groups, values()


def rekey(
    state_dict: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    by_name: bool,
) -> dict[str, Any]:
    """Convert states keyed by index to states keyed by parameter name, or the reverse.

    Indices are positions in the optimizer's parameter order, or in the model's if no optimizer is
    given.
    """
    known = _names(model)
    names = list(known.values())
    if optimizer is not None:
        names = [_name_of(known, p) for p in params_of(optimizer)]
    to: dict[Any, Any] = (
        dict(enumerate(names)) if by_name else {name: i for i, name in enumerate(names)}
    )
    return {
        "state": {to[key]: values for key, values in state_dict["state"].items()},
        "param_groups": [
            {**g, "params": [to[key] for key in g["params"]]} for g in state_dict["param_groups"]
        ],
    }


def _name_of(names: dict[int, str], p: torch.Tensor) -> str:
    if id(p) not in names:
        raise KeyError(f"the optimizer has a parameter {tuple(p.shape)} that the model has not")
    return names[id(p)]


def _state_of(optimizer: Any, p: torch.Tensor) -> dict[str, Any]:
    if hasattr(optimizer, "shard_state"):
        return optimizer.shard_state(p)
    return optimizer.state.get(p, {})


def _set_state(optimizer: Any, p: torch.Tensor, values: dict[str, Any]) -> None:
    if hasattr(optimizer, "set_shard_state"):
        optimizer.set_shard_state(p, values)
    elif values:
        optimizer.state[p] = values
