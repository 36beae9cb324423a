"""Initialisation by counters: element i of a parameter depends on (seed, stream, i) alone.

Every call takes the next stream of the generator that :func:`fsdpc.manual_seed` sets, so the same
program gives the same full parameters at any world size, deferred or not.
"""

from __future__ import annotations

from fsdpc import _core
from fsdpc.nn.module import Parameter


def _init(p: Parameter, kind: str, a: float, b: float) -> Parameter:
    recipe = (kind, float(a), float(b), _core.initial_seed(), _core.next_stream())
    if p._unit is not None:
        p._unit.init(p._index, *recipe)
    elif p.is_deferred:
        p._recipe = recipe
    else:
        _core.init_(p, *recipe)
    return p


def normal_(p: Parameter, mean: float = 0.0, std: float = 1.0) -> Parameter:
    """Fill with independent normal values (Box-Muller over Philox words)."""
    return _init(p, "normal", mean, std)


def uniform_(p: Parameter, low: float = 0.0, high: float = 1.0) -> Parameter:
    """Fill with independent values, uniform in [low, high)."""
    return _init(p, "uniform", low, high)


def constant_(p: Parameter, value: float) -> Parameter:
    """Fill with one value."""
    return _init(p, "constant", value, 0.0)


def zeros_(p: Parameter) -> Parameter:
    """Fill with 0."""
    return constant_(p, 0.0)


def ones_(p: Parameter) -> Parameter:
    """Fill with 1."""
    return constant_(p, 1.0)
