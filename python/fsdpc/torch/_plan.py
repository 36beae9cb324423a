"""Find the submodules that a plan turns into units, and their options.

A plan is either a function of (dotted name, module) that returns options or None, or a mapping from
name patterns to options, where a star matches one part. transformers' plans are accepted unchanged.
A tuple of patterns makes one unit; ``"free_full_weight"`` and ``"keep_full_weight"`` specify
whether to reshard its parameters after forward. Modules of a plan that share a parameter become one
unit. A module that shares a parameter with an unmatched module belongs to the enclosing module's
unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fsdpc.sharding.wrap import units_by

STYLES: dict[str, dict[str, Any]] = {
    "free_full_weight": {"reshard_after_forward": True},
    "keep_full_weight": {"reshard_after_forward": False},
}

Group = tuple[list[nn.Module], dict[str, Any]]


def groups_of(modules: list[nn.Module], plan: Any) -> list[Group]:
    """Return (modules, options) of each unit inside these modules, inner units first.

    Raises
    ------
    ValueError
        A value is not a valid option, or a pattern matches no module.
    """
    if callable(plan):
        return units_by(plan, modules)
    return [g for m in modules for g in _tied_together(m, _by_patterns(m, plan))]


def _by_patterns(module: nn.Module, plan: Mapping[Any, Any]) -> list[Group]:
    found: list[Group] = []
    units: dict[tuple[str, ...], Group] = {}
    for name, m in reversed(list(module.named_modules())[1:]):
        for key, value in plan.items():
            patterns = key if isinstance(key, tuple) else (key,)
            if not any(fits(name, pattern) for pattern in patterns):
                continue
            if isinstance(key, tuple) and key in units:
                units[key][0].insert(0, m)
            else:
                found.append(([m], _options(key, value)))
                if isinstance(key, tuple):
                    units[key] = found[-1]
            break
    if plan and not found:
        raise ValueError(
            f"the plan fits no module of {type(module).__name__}: patterns {list(plan)}, modules "
            f"{[name for name, _ in module.named_modules() if name][:8]} ..."
        )
    return found


def fits(name: str, pattern: str) -> bool:
    """Return whether each part of a dotted name matches the same part of a pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _options(key: Any, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if value not in STYLES:
        raise ValueError(
            f"the plan says {value!r} for {key!r}: give a dict of fully_shard's options, or one of "
            f"{sorted(STYLES)}"
        )
    return dict(STYLES[value])


def _tied_together(root: nn.Module, groups: list[Group]) -> list[Group]:
    """Join groups that share a parameter; drop those that share one with an unmatched module."""
    owners: dict[int, set[int]] = {}  # parameter -> modules that contain it
    for m in root.modules():
        for p in m._parameters.values():
            if p is not None:
                owners.setdefault(id(p), set()).add(id(m))
    tied = {p: own for p, own in owners.items() if len(own) > 1}
    inside = [{id(m) for top in tops for m in top.modules()} for tops, _ in groups]
    planned: set[int] = set().union(*inside) if inside else set()
    result: list[Group] = []
    at: dict[int, Group] = {}  # tied parameter -> its group
    for (tops, options), modules in zip(groups, inside, strict=True):
        shared = [p for p, own in tied.items() if own & modules and own - modules]
        if any(not tied[p] <= planned for p in shared):
            continue
        other = next((at[p] for p in shared if p in at), None)
        if other is None:
            other = (list(tops), dict(options))
            result.append(other)
        else:
            keeps = False in (
                options.get("reshard_after_forward"),
                other[1].get("reshard_after_forward"),
            )
            other[0][:0] = tops
            other[1].update(options)
            if keeps:
                other[1]["reshard_after_forward"] = False
        at.update((p, other) for p in shared)
    return result
