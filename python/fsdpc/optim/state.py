"""Optimizer states by parameter name, as full values that load on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpc import _core
from fsdpc.nn.module import check_real, float_tensor

if TYPE_CHECKING:
    from fsdpc.nn.module import Module, Parameter
    from fsdpc.optim.optimizer import Optimizer


def get_optimizer_state_dict(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's states and options by dotted parameter name in the model.

    Parameters
    ----------
    model : Module
        A model with all of the optimizer's parameters, sharded or not.
    optimizer : Optimizer

    Returns
    -------
    dict
        Has the format of :meth:`Optimizer.state_dict`.

    Raises
    ------
    ValueError
        The optimizer has parameters that the model lacks.

    Notes
    -----
    Collective for sharded parameters; every rank gets the full values.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn, optim
    >>> model = nn.Linear(2, 1)
    >>> optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(fsdpc.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> state = optim.get_optimizer_state_dict(model, optimizer)
    >>> sorted(state["state"]), sorted(state["state"]["bias"])
    (['bias', 'weight'], ['momentum_buffer', 'step'])
    """
    return gather(optimizer, _names_in(model))


def set_optimizer_state_dict(model: Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load states and options under the model's parameter names.

    Parameters
    ----------
    model : Module
        A model with all of the optimizer's parameters, sharded or not.
    optimizer : Optimizer
    state : mapping
        Result of :func:`get_optimizer_state_dict`, saved at any number of ranks.

    Raises
    ------
    KeyError, ValueError
        Names, groups, states or shapes differ from the optimizer's; nothing has changed then.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import nn, optim
    >>> model = nn.Linear(2, 1)
    >>> optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(fsdpc.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> state = optim.get_optimizer_state_dict(model, optimizer)
    >>> fresh = optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    >>> optim.set_optimizer_state_dict(model, fresh, state)
    >>> fresh.param_groups[0]["lr"]
    0.1
    """
    load(optimizer, state, _names_in(model))


def _names_in(model: Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def _named(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Parameter]]:
    """Return each group's parameters by name."""
    found: list[dict[str, Parameter]] = []
    for index, group in enumerate(optimizer.param_groups):
        without = [i for i, p in enumerate(group["params"]) if id(p) not in names]
        if without:
            raise ValueError(
                f"{len(without)} parameters of group {index} have no name, the first is number "
                f"{without[0]}: give the optimizer (name, parameter) pairs, as "
                "model.named_parameters() yields them, or call get_optimizer_state_dict() and "
                "set_optimizer_state_dict() with the model that holds them"
            )
        found.append({names[id(p)]: p for p in group["params"]})
    return found


def gather(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return states and options by name, as full values; collective if any parameter is sharded."""
    groups = _named(optimizer, names)
    state = {
        name: {"step": optimizer.step_count(p), **dict(full_states(optimizer, p))}
        for group in groups
        for name, p in group.items()
        if optimizer.step_count(p) > 0
    }
    options = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": list(named)}
        for group, named in zip(optimizer.param_groups, groups, strict=True)
    ]
    return {"state": state, "param_groups": options}


def full_states(
    optimizer: Optimizer, p: Parameter, wanted: str | None = None
) -> Iterator[tuple[str, _core.Tensor]]:
    """Yield (name, full value) for each state of a parameter, or only for the state ``wanted``."""
    for k, name in enumerate(optimizer._state_names(p)):
        if wanted not in (None, name) or optimizer._view(p, k, name) is None:
            continue
        if p._unit is not None:
            yield name, optimizer._collect(p, k)
        elif (own := optimizer._decoded(p, k, name)) is not None:
            yield name, own


def load(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Load the result of :func:`gather`, or change nothing if any value does not fit."""
    missing = {"state", "param_groups"} - set(state)
    if missing:
        raise KeyError(f"an optimizer's state has 'state' and 'param_groups'; missing {missing}")
    groups = _named(optimizer, names)
    _check_groups(optimizer, groups, state["param_groups"])
    kept = [dict(group) for group in optimizer.param_groups]
    for group, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in given.items() if key != "params"})
    try:
        optimizer._set_options()  # options determine the set of states
        _check_states(optimizer, groups, state["state"])
    except BaseException:
        for group, before in zip(optimizer.param_groups, kept, strict=True):
            group.clear()
            group.update(before)
        optimizer._set_options()
        raise
    for named in groups:
        for name, p in named.items():
            optimizer.set_step_count(p, 0)
            if name in state["state"]:
                _load_one(optimizer, p, state["state"][name])


def _check_groups(
    optimizer: Optimizer, groups: list[dict[str, Parameter]], given: list[dict[str, Any]]
) -> None:
    if len(given) != len(groups):
        raise ValueError(
            f"the state is of {len(given)} parameter groups, the optimizer has {len(groups)}"
        )
    for index, (own, other) in enumerate(zip(groups, given, strict=True)):
        missing = sorted(own.keys() - set(other["params"]))
        unexpected = sorted(set(other["params"]) - own.keys())
        if missing or unexpected:
            raise KeyError(
                f"group {index} of the state does not fit: missing {missing}, unexpected "
                f"{unexpected}"
            )
        # schedulers add "initial_lr"
        known = {*optimizer._defaults_of(other), "params", "initial_lr"}
        unknown = sorted(set(other) - known)
        if unknown:
            raise ValueError(f"group {index} of the state has unknown options {unknown}")


def _check_states(
    optimizer: Optimizer, groups: list[dict[str, Parameter]], given: Mapping[str, Any]
) -> None:
    parameters = {name: p for group in groups for name, p in group.items()}
    unexpected = sorted(given.keys() - parameters.keys())
    if unexpected:
        raise KeyError(f"states of parameters that the optimizer has not: {unexpected}")
    for name, entry in given.items():
        p = parameters[name]
        needed = {"step", *optimizer._state_names(p)}
        # The momentum is missing if it was enabled after the last step.
        missing = sorted(needed - set(entry) - {"momentum_buffer"})
        surplus = sorted(set(entry) - needed)
        if missing or surplus:
            raise KeyError(
                f"the state of '{name}' does not fit {optimizer._KIND}: missing {missing}, "
                f"unexpected {surplus}"
            )
        values = {each: value for each, value in entry.items() if each != "step"}
        for each, value in values.items():
            wanted = optimizer._state_shape(p, each)
            if np.shape(value) != wanted:
                raise ValueError(f"{each} of '{name}': {np.shape(value)} given, {wanted} wanted")
        check_real({f"{each} of '{name}'": value for each, value in values.items()})


def _load_one(optimizer: Optimizer, p: Parameter, entry: Mapping[str, Any]) -> None:
    names = optimizer._state_names(p)
    values = {name: float_tensor(entry[name]) for name in names if name in entry}
    if p._unit is None:
        optimizer._write_rows(p, values)
    else:
        for name, value in values.items():
            optimizer._write_full(p, names.index(name), value)
    optimizer.set_step_count(p, int(entry["step"]))
