"""The formats of optimizer states: floats, or block codes of a byte per element."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fsdpc import _core

MAXIMA = "_blockmax"  # ends the name of the maxima of a state's blocks


def is_maxima(name: str) -> bool:
    """Return whether a state's name is that of its blocks' maxima."""
    return name.endswith(MAXIMA)


def blocks_in(numel: int, shape: tuple[int, ...]) -> int:
    """Return the number of blocks in whole rows of a parameter of this shape."""
    row = _core.code_row(shape)
    return numel // row * -(-row // 256)


class Int8(NamedTuple):
    """States of one byte per element, as ``state_dtype`` of an optimizer.

    The elements of a row are coded in blocks of 256, relative to the largest magnitude, which
    is kept in float32. States of parameters with one dimension, with rows shorter than 64 elements
    or with fewer elements than ``min_numel`` stay float32, as do those of parameters with three or
    more dimensions whose rows (elements per index of dim 0) are not multiples of 256.

    Parameters
    ----------
    min_numel : int, default 4096
        The size from which parameters have coded states.

    Examples
    --------
    >>> from fsdpc import nn, optim
    >>> model = nn.Linear(64, 64)
    >>> optimizer = optim.AdamW(model.parameters(), state_dtype=optim.Int8(min_numel=0))
    >>> same = optim.AdamW(model.parameters(), state_dtype="int8")  # from 4096 elements
    """

    min_numel: int = 4096


def as_format(state_dtype: Any) -> tuple[_core.dtype, int]:
    """Return the engine's dtype of states, and the size from which parameters are coded."""
    if state_dtype is None:
        return _core.float32, 0
    if isinstance(state_dtype, str) and state_dtype == "int8":
        state_dtype = Int8()
    if isinstance(state_dtype, Int8):
        if state_dtype.min_numel < 0:
            raise ValueError(f"Int8(min_numel={state_dtype.min_numel}): sizes count from 0")
        return _core.uint8, state_dtype.min_numel
    found = _core.as_dtype(state_dtype)
    if found is _core.uint8:
        raise TypeError("the states of an optimizer are float32, bfloat16 or 'int8', not uint8")
    return found, 0


def code_row(form: tuple[_core.dtype, int], dtype: _core.dtype, shape: tuple[int, ...]) -> int:
    """Return the row inside which a parameter's blocks are counted; 0 if it is not coded."""
    coded, min_numel = form
    if coded is not _core.uint8 or dtype is _core.float64 or math.prod(shape) < min_numel:
        return 0
    return _core.code_row(shape)


def decoded(
    code: str, view: _core.Tensor, maxima: _core.Tensor | None, shape: tuple[int, ...]
) -> _core.Tensor:
    """Return a copy of a state's rows as floats; ``shape`` is the parameter's or the rows'."""
    if maxima is None or view.numel() == 0:
        return view.clone() if maxima is None else _core.zeros(view.shape)
    return _core.decode_blocks(code, view, maxima, _core.code_row(shape))


def write_rows(
    codes: Iterable[tuple[str, str]],
    views: Mapping[str, _core.Tensor],
    values: Mapping[str, _core.Tensor],
    shape: tuple[int, ...],
) -> None:
    """Write a parameter's rows into its states, in whichever format either is.

    Parameters
    ----------
    codes : iterable of (str, str)
        Each state's name and code.
    views, values : mapping
        Memory of the states, and new contents of the same shape; with maxima if they are codes.
    shape : tuple of int
        The parameter's or the rows'.
    """
    for name, code in codes:
        if name not in values or views[name].numel() == 0:
            continue
        value, most = values[name], values.get(name + MAXIMA)
        if name + MAXIMA not in views:
            value = decoded(code, value, most, shape)
        elif most is None:
            value, most = _core.encode_blocks(code, value.to(_core.float32), _core.code_row(shape))
        views[name].copy_(value)
        if most is not None and name + MAXIMA in views:
            views[name + MAXIMA].copy_(most)


def state_bytes(state_dtype: Any) -> float:
    """Return the bytes per element of a large matrix's state."""
    form, _ = as_format(state_dtype)
    return 1 + 4 / 256 if form is _core.uint8 else form.itemsize
