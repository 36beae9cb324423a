"""Track, between ``unscale_`` and the optimizer's step, whether gradients are finite.

A loss scaler must know whether any gradient overflowed. A global norm reveals this: it is NaN or
infinite if and only if one did. A scaler that has unscaled a unit's gradients therefore registers
here to learn of norms, and measures only the units that no norm has covered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

# unit -> the scaler's notes: id of a unit -> whether it overflowed
_watched: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


def watch(unit: Any, notes: dict[int, bool]) -> None:
    """Start recording in ``notes`` the norms that cover the unit."""
    _watched[unit] = notes


def forget(units: Iterable[Any]) -> None:
    """Undo :func:`watch`."""
    for unit in units:
        _watched.pop(unit, None)


def is_watching(units: Iterable[Any]) -> bool:
    """Return whether a scaler is waiting for norms that cover any of these units."""
    return bool(_watched) and any(unit in _watched for unit in units)


def report(units: Iterable[Any], overflowed: bool) -> None:
    """Record whether a norm over these units and all ranks was NaN or infinite."""
    for unit in units if _watched else ():
        notes = _watched.get(unit)
        if notes is not None:
            notes[id(unit)] = overflowed
