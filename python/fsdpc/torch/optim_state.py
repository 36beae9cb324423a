"""Optimizer states of sharded models: full tensors by parameter name, whatever the optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdpc.torch import _device, _rows
from fsdpc.torch._unit import PieceInfo, UnitState, states_of
from fsdpc.torch.state_dict import _broadcast, _rank


def gather_rows(info: PieceInfo, rows: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of which every rank has the rows of a parameter; collective."""
    state, comm = info._state, info._state.comms[0]
    flat = rows.detach().reshape(-1).contiguous()
    if comm.size == 1:
        return flat.clone().view(info.shape)
    mine = torch.tensor([state.places[info._index][2], flat.numel()])
    places = _device.to_torch(comm.all_gather(_device.to_engine(mine)))
    padded = torch.zeros(int(places[:, 1].max()), dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    everyone = _device.to_torch(comm.all_gather(_device.to_engine(padded)))
    full = torch.empty(info.shape.numel(), dtype=flat.dtype, device=flat.device)
    for (first, numel), part in zip(places.tolist(), everyone, strict=True):
        full[first : first + numel] = part[:numel]
    return full.view(info.shape)


def own_rows(info: PieceInfo, piece: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a full tensor, shaped as the piece."""
    _, _, first, numel, _ = info._state.places[info._index]
    return full.detach().reshape(-1)[first : first + numel].clone().view(piece.shape)


_WRAPPER = "_checkpoint_wrapped_module."  # torch's, which leaves it out of state dicts too


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name.replace(_WRAPPER, "") for name, p in model.named_parameters()}


def get_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return an optimizer's states as full tensors by parameter name; collective.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
        Over the model's pieces: one of ``torch.optim`` or of ``fsdpc.torch.optim``.
    rank0_only : bool, default False
        Other ranks take part and get an empty dict.

    Returns
    -------
    dict
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.
    """
    names = _names(model)
    rank = 0
    states: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = _name_of(names, p)
            info = getattr(p, "fsdpc", None)
            values = _state_of(optimizer, p)
            full = {}
            for key, value in values.items():
                sharded = isinstance(value, torch.Tensor) and value.shape == p.shape and p.dim()
                if info is not None and sharded:
                    value = gather_rows(info, value)
                elif isinstance(value, torch.Tensor):
                    value = value.clone()
                full[key] = value
            if full:
                states[name] = full
            if info is not None:
                rank = max(comm.rank for comm in info._state.comms)
    if rank0_only and rank != 0:
        return {}
    groups = [
        {**{k: v for k, v in g.items() if k != "params"},
         "params": [_name_of(names, p) for p in g["params"]]}
        for g in optimizer.param_groups
    ]  # fmt: skip
    return {"state": states, "param_groups": groups}


def set_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load what :func:`get_optimizer_state_dict` returned; every rank keeps its rows.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
        With the same parameters in the same groups.
    state_dict : mapping
        The same on every rank; the world size may be another than the saved one's.

    Raises
    ------
    KeyError
        A parameter that the optimizer has is missing in the groups.
    """
    names = _names(model)
    given = {name for g in state_dict["param_groups"] for name in g["params"]}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
        for p in group["params"]:
            name = _name_of(names, p)
            if name not in given:
                raise KeyError(f"no optimizer state for parameter '{name}': other names were saved")
            info = getattr(p, "fsdpc", None)
            values = dict(state_dict["state"].get(name, {}))
            for key, value in values.items():
                whole = isinstance(value, torch.Tensor) and info is not None
                if whole and value.shape == info.shape and value.dim():
                    values[key] = own_rows(info, p, value)
                elif isinstance(value, torch.Tensor):
                    values[key] = value.clone()
            _set_state(optimizer, p, values)


class Saved:
    """What ``optimizer.state_dict()`` returned, read as an optimizer is.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose parameters, in order, the numbers in it stand for.
    state_dict : mapping
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        self._states = {id(p): state_dict["state"].get(i, {}) for i, p in enumerate(params)}
        self.param_groups = [
            {**saved, "params": group["params"]}
            for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
        ]

    def piece_state(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the states of one parameter."""
        return self._states[id(p)]


def local_optimizer_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return this rank's rows of the states by parameter name.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
    """
    names = _names(model)
    states = {
        _name_of(names, p): _rows.mark(
            p,
            {
                k: v.clone() if isinstance(v, torch.Tensor) else v
                for k, v in _state_of(optimizer, p).items()
            },
        )
        for g in optimizer.param_groups
        for p in g["params"]
    }
    groups = [
        {**g, "params": [_name_of(names, p) for p in g["params"]]} for g in optimizer.param_groups
    ]
    return {"state": {n: s for n, s in states.items() if s}, "param_groups": groups}


def to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """Return this rank's part of states by name, as ``optimizer.load_state_dict`` takes it.

    Parameters
    ----------
    model : nn.Module
    optimizer : torch.optim.Optimizer
    state_dict : mapping
        Full states, or this rank's rows of them.
    rank0_only : bool, default False
        Take rank 0's, which goes to the others tensor by tensor; collective then.

    Raises
    ------
    KeyError
        The optimizer has no parameter of a name that was saved.
    """
    names = _names(model)
    order = [p for g in optimizer.param_groups for p in g["params"]]
    at = {_name_of(names, p): (i, p) for i, p in enumerate(order)}

    def index(name: str) -> int:
        if name not in at:
            raise KeyError(f"the optimizer has no parameter '{name}' for the state that was saved")
        return at[name][0]

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
        info = getattr(order[i], "fsdpc", None)
        if isinstance(value, torch.Tensor):
            whole = info is not None and value.dim() and value.shape == info.shape
            if whole:
                value = own_rows(info, order[i], value)
            else:
                value = _rows.check(order[i], {key: value})[key].clone()
        states.setdefault(i, {})[key] = value
    numbered = [{**g, "params": [index(name) for name in g["params"]]} for g in groups]
    return {"state": states, "param_groups": numbered}


def _from_rank_0(
    state_dict: Mapping[str, Any] | None, units: list[UnitState]
) -> tuple[list[dict[str, Any]], Iterator[tuple[str, str, Any]]]:
    """Rank 0's groups, and its values one after the other."""
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
    """Return states by parameter name instead of number, or the other way round.

    Parameters
    ----------
    state_dict : mapping
    model : nn.Module
    optimizer : torch.optim.Optimizer, optional
        Whose order of parameters the numbers are; the model's where not given.
    by_name : bool
    """
    names = list(_names(model).values())
    if optimizer is not None:
        known = _names(model)
        names = [_name_of(known, p) for g in optimizer.param_groups for p in g["params"]]
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
    if hasattr(optimizer, "piece_state"):
        return optimizer.piece_state(p)
    return optimizer.state.get(p, {})


def _set_state(optimizer: Any, p: torch.Tensor, values: dict[str, Any]) -> None:
    if hasattr(optimizer, "set_piece_state"):
        optimizer.set_piece_state(p, values)
    elif values:
        optimizer.state[p] = values
