"""Convert state dicts to JSON and back, without loss.

Values that JSON cannot represent become a dict with a single key that begins with a dollar sign.
Such values are tuples, non-finite numbers, counters, and dicts with non-text keys. (``MultiStepLR``
counts milestones by number, and ``ReduceLROnPlateau`` starts at infinity.)
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

_TUPLE, _FLOAT, _COUNTER, _ITEMS = "$tuple", "$float", "$counter", "$items"


def encode(value: Any) -> Any:
    """Convert numbers, text, None, and lists, tuples and dicts of such values to JSON.

    Other values stay unchanged.
    """
    if isinstance(value, tuple):
        return {_TUPLE: [encode(each) for each in value]}
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    if not isinstance(value, dict):
        return value
    if type(value) is Counter:
        return {_COUNTER: _pairs(value)}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(each) for key, each in value.items()}
    return {_ITEMS: _pairs(value)}


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [[encode(key), encode(each)] for key, each in value.items()]


def decode(value: Any) -> Any:
    """Return the value that :func:`encode` encoded."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(decode(value[_TUPLE]))
    if _FLOAT in value:
        return float(value[_FLOAT])
    for key, kind in ((_COUNTER, Counter), (_ITEMS, dict)):
        if key in value:
            return kind({decode(k): decode(each) for k, each in value[key]})
    return {key: decode(each) for key, each in value.items()}
