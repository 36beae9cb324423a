"""Policies that choose which submodules become units, by class, size or name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from fsdpc.nn.module import Module

#: Called with a submodule (dotted name, module); returns its options if it is a unit, or None.
WrapPolicy = Callable[[str, Module], "dict[str, Any] | None"]


def by_class(*classes: type) -> WrapPolicy:
    """Make every module of these classes a unit.

    Examples
    --------
    >>> import fsdpc
    >>> from fsdpc import wrap
    >>> policy = wrap.by_class(fsdpc.nn.Linear)
    >>> policy("fc", fsdpc.nn.Linear(4, 4))
    {}
    """
    if not classes:
        raise ValueError("by_class needs at least one class")

    def policy(name: str, module: Module) -> dict[str, Any] | None:
        return {} if isinstance(module, classes) else None

    return policy


def by_size(min_params: int) -> WrapPolicy:
    """Make units with at least ``min_params`` parameters, innermost modules first.

    Examples
    --------
    >>> from fsdpc import nn, wrap
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    >>> units = wrap.units_by(wrap.by_size(1000), [model])
    >>> [modules[0] is model[0] for modules, options in units]
    [True]
    """
    if min_params < 1:
        raise ValueError(f"min_params is 1 or more, got {min_params}")
    taken: set[int] = set()

    def policy(name: str, module: Module) -> dict[str, Any] | None:
        left = {id(p): prod(p.shape) for p in module.parameters() if id(p) not in taken}
        if sum(left.values()) < min_params or type(module).forward is Module.forward:
            return None
        taken.update(left)
        return {}

    return policy


def by_name(plan: Mapping[str, Mapping[str, Any]]) -> WrapPolicy:
    """Make a unit, with options, of each module whose dotted name matches a shell-style pattern.

    Examples
    --------
    >>> from fsdpc import nn, wrap
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> policy = wrap.by_name({"0": {}, "2": {"reshard_after_forward": False}})
    >>> units = wrap.units_by(policy, [model])
    >>> [options for modules, options in units]
    [{'reshard_after_forward': False}, {}]
    """

    def policy(name: str, module: Module) -> dict[str, Any] | None:
        for pattern, options in plan.items():
            if fnmatchcase(name, pattern):
                return dict(options)
        return None

    return policy


def check_names(plan: Mapping[str, Any], modules: Iterable[Module]) -> None:
    """Raise ValueError if a pattern matches no submodule, because it is probably a typo.

    Examples
    --------
    >>> from fsdpc import nn, wrap
    >>> model = nn.Sequential(nn.Linear(4, 4))
    >>> wrap.check_names({"0": {}}, [model])
    >>> try:
    ...     wrap.check_names({"layers.*": {}}, [model])
    ... except ValueError:
    ...     print("a pattern fits nothing")
    a pattern fits nothing
    """
    names = [name for module in modules for name, _ in module.named_modules() if name]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names[:8]) + (", ..." if names[8:] else "") or "none"
            raise ValueError(f"the plan's '{pattern}' fits no submodule; there are {known}")


def units_by(
    policy: Callable[[str, Any], dict[str, Any] | None], modules: Iterable[Any]
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return the units that a policy chooses, as submodules with their options.

    Children come first, and the list is complete before any unit is sharded.

    Examples
    --------
    >>> from fsdpc import nn, wrap
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> units = wrap.units_by(lambda name, m: {} if isinstance(m, nn.Linear) else None, [model])
    >>> len(units), units[0][0][0] is model[0]
    (1, True)
    """
    inside = [each for m in modules for each in reversed(list(m.named_modules())) if each[0]]
    answers = [(child, policy(name, child)) for name, child in inside]
    return [([child], options) for child, options in answers if options is not None]
