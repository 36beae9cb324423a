"""What is known of the gradients' finiteness between ``unscale_`` and the optimizer's step.

A loss scaler must know whether any gradient overflowed, and a global norm tells: it is NaN or
infinite exactly then. So a scaler that has unscaled a unit's gradients asks here to be told of
norms, and measures by itself only what no norm has covered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

# unit -> the scaler's notes: id of a unit -> whether it overflowed
_watched: WeakKeyDictionary[Any, dict[int, bool]] = WeakKeyDictionary()


def watch(unit: Any, notes: dict[int, bool]) -> None:
    """Have norms that cover the unit written into ``notes``."""
    _watched[unit] = notes


def forget(units: Iterable[Any]) -> None:
    """End what :func:`watch` began."""
    for unit in units:
        _watched.pop(unit, None)


def is_watching(units: Iterable[Any]) -> bool:
    """Tell whether anybody asked for norms that cover one of these units."""
    return bool(_watched) and any(unit in _watched for unit in units)


def report(units: Iterable[Any], overflowed: bool) -> None:
    """Say whether a norm over these units, together and over all ranks, was not finite."""
    for unit in units if _watched else ():
        notes = _watched.get(unit)
        if notes is not None:
            notes[id(unit)] = overflowed
