"""Optimizer states of sharded models: full tensors by parameter name, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdpc import _core
from fsdpc.torch._unit import PieceInfo


def gather_rows(info: PieceInfo, rows: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of which every rank has the rows of a parameter; collective."""
    state, comm = info._state, info._state.comms[0]
    flat = rows.detach().reshape(-1).contiguous()
    if comm.size == 1:
        return flat.clone().view(info.shape)
    mine = torch.tensor([state.places[info._index][2], flat.numel()])
    places = torch.from_dlpack(comm.all_gather(_core.from_dlpack(mine)))
    padded = torch.zeros(int(places[:, 1].max()), dtype=flat.dtype)
    padded[: flat.numel()] = flat
    everyone = torch.from_dlpack(comm.all_gather(_core.from_dlpack(padded)))
    full = torch.empty(info.shape.numel(), dtype=flat.dtype)
    for (first, numel), part in zip(places.tolist(), everyone, strict=True):
        full[first : first + numel] = part[:numel]
    return full.view(info.shape)


def own_rows(info: PieceInfo, piece: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a full tensor, shaped as the piece."""
    _, _, first, numel, _ = info._state.places[info._index]
    return full.detach().reshape(-1)[first : first + numel].clone().view(piece.shape)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


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
