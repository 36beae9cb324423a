"""State dicts of sharded torch models: full tensors out, full tensors in.

``model.state_dict()`` of a sharded module gives full tensors under the names the plain model has,
and ``load_state_dict`` takes them; what stands here is that, and its options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdpc.torch._unit import UnitState, full_value, states_of


class _Option:
    """How many summon contexts are open, so that inner calls do not gather again."""

    depth = 0


def _show(states: list[UnitState], values: dict[tuple[int, int], Any]) -> None:
    for state in states:
        for owner, key, i in state.slots:
            owner[key] = values[id(state), i]


def _pieces(states: list[UnitState]) -> dict[tuple[int, int], Any]:
    return {(id(s), i): p for s in states for i, p in enumerate(s.pieces)}


@contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Let every parameter be a private full copy in its original dtype; collective.

    Parameters
    ----------
    module : nn.Module
        Its units, and those of modules inside it.
    recurse : bool, default True
        Without: the units of this very module alone.
    writeback : bool, default True
        On leaving each rank keeps its own rows of what the copies hold then. Not done after an
        exception.
    rank0_only : bool, default False
        Other ranks keep their pieces; needs ``writeback=False``.
    offload_to_cpu : bool, default False
        Copies are in host memory in any case.
    with_grads : bool, default False
        The copies have full gradients, and ``writeback`` keeps the own rows of these too.

    Notes
    -----
    The modules cannot be called inside.
    """
    if rank0_only and writeback:
        raise ValueError("rank0_only with writeback=True: other ranks would keep the old rows")
    states = states_of(module) if recurse else [module._fsdpc_state]  # type: ignore[list-item]
    for state in states:
        if state.door.depth or state.door.in_backward:
            raise RuntimeError(f"summon_full_params inside forward or backward: {state.unit.name}")
    mine = not rank0_only or not states or _rank(states) == 0
    fulls: dict[tuple[int, int], Any] = {}
    for s in states:
        for i, p in enumerate(s.pieces):
            value = full_value(s, i)
            grad = full_grad(p) if with_grads else None
            fulls[id(s), i] = nn.Parameter(value, p.requires_grad) if mine else p
            if mine:
                fulls[id(s), i].grad = grad
    _show(states, fulls)
    try:
        yield
        if writeback:
            for s in states:
                for i in range(len(s.pieces)):
                    s.write(i, fulls[id(s), i])
                    if with_grads:
                        _write_grad(s, i, fulls[id(s), i].grad)
    finally:
        _show(states, _pieces(states))


def _write_grad(state: UnitState, index: int, full: torch.Tensor | None) -> None:
    """Keep the own rows of a full gradient; None is none."""
    grad = state.pieces[index].grad
    if full is None or grad is None:
        state.pieces[index].grad = None
        return
    _, _, first, numel, _ = state.places[index]
    with torch.no_grad():
        grad.copy_(full.reshape(-1)[first : first + numel].view(grad.shape))


def _rank(states: list[UnitState]) -> int:
    return max(comm.rank for comm in states[0].comms)


def full_grad(p: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's full averaged gradient, or None; collective if it is sharded."""
    info = getattr(p, "fsdpc", None)
    if p.grad is None or info is None:
        return p.grad
    info._state.door.take_grads()
    return torch.from_dlpack(info.unit.collect(info._index, True))


def module_state_dict(module: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """``state_dict`` of a sharded module: that of the plain one, over full copies."""
    if _Option.depth:
        return call(*args, **kwargs)
    _Option.depth += 1
    try:
        with summon_full_params(module, writeback=False):
            return call(*args, **kwargs)
    finally:
        _Option.depth -= 1


def local_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return this rank's pieces by name, as they are."""
    _Option.depth += 1
    try:
        return nn.Module.state_dict(module, *args, **kwargs)
    finally:
        _Option.depth -= 1


def module_load_state_dict(
    module: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """``load_state_dict`` of a sharded module: each rank keeps its rows of full tensors."""
    states = states_of(module)
    news: dict[tuple[int, int], Any] = {}
    for s in states:
        for i, p in enumerate(s.pieces):
            empty = torch.full(s.shapes[i], float("nan"), dtype=p.dtype)
            news[id(s), i] = nn.Parameter(empty, p.requires_grad)
    _show(states, news)
    try:
        result = nn.Module.load_state_dict(module, state_dict, strict=strict, assign=assign)
        for s in states:
            for owner, key, i in s.slots:
                news[id(s), i] = owner[key]
    finally:
        _show(states, _pieces(states))
    missing = set(result.missing_keys)
    pieces = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    for s in states:
        for i, p in enumerate(s.pieces):
            if pieces[id(p)] not in missing:
                s.write(i, news[id(s), i])
    return result


def get_model_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
    """Return full parameters and buffers by name; collective.

    Parameters
    ----------
    model : nn.Module
    rank0_only : bool, default False
        Other ranks take part and get an empty dict; full tensors exist one at a time there.
    """
    keep = True
    units = states_of(model)
    if rank0_only and units:
        keep = _rank(units) == 0
    result: dict[str, torch.Tensor] = {}
    values: dict[int, torch.Tensor] = {}
    for s in units:
        for i, p in enumerate(s.pieces):
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
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
) -> Any:
    """Load full tensors by name; each rank keeps its rows.

    Parameters
    ----------
    model : nn.Module
    state_dict : mapping of str to Tensor
        The same on every rank.
    strict : bool, default True
        Raise if names differ.
    """
    return model.load_state_dict(state_dict, strict=strict)
