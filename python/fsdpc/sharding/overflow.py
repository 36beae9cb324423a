"""Track whether gradients are finite between ``unscale_`` and the optimizer's step.

A loss scaler must know whether any gradient overflowed. A global norm shows it: the norm is NaN or
infinite exactly if one did. A scaler that has unscaled a unit's gradients therefore registers here
for norms, and measures only the units that no norm has covered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

# unit -> the scaler's notes: id of a unit -> whether it overflowed
_watched: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


def watch(unit: Any, notes: dict[int, bool]) -> None:
    """Record norms that cover the unit in ``notes``."""
    _watched[unit] = notes


def forget(units: Iterable[Any]) -> None:
    """Undo :func:`watch`."""
    for unit in units:
        _watched.pop(unit, None)


def is_watching(units: Iterable[Any]) -> bool:
    """Return whether a scaler wants norms that cover one of these units."""
    return bool(_watched) and any(unit in _watched for unit in units)


def report(units: Iterable[Any], overflowed: bool) -> None:
    """Record whether a norm over these units, together and over all ranks, was not finite."""
    for unit in units if _watched else ():
        notes = _watched.get(unit)
        if notes is not None:
            notes[id(unit)] = overflowed
