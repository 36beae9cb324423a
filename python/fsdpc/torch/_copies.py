"""Copies of pieces, and state dict values, both of which have DTensor's ``full_tensor()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdpc.torch._dcp import Part
from fsdpc.torch._grads import PieceGrad
from fsdpc.torch._reads import (
    AS_NUMBER,
    ELEMENTWISE,
    KEEPING,
    RUNNING,
    SUMS,
    TAKING,
    WATCHED,
    check,
    check_mixed,
    refuse_backward,
)
from fsdpc.torch._rows import Home, LocalRows, Whole, as_number, gather_rows, whole_sum


class FullValue(Whole):
    """A full value in a state dict; operations on it return plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = self.clone().as_subclass(FullValue)
        return copied


_NOTED = WATCHED | KEEPING | ELEMENTWISE | TAKING
_is_grad_enabled = torch.is_grad_enabled
_disabled: Callable[..., Any] = torch._C._disabled_torch_function_impl


def on_rows(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Run an operation on a piece or its copy; the ``__torch_function__`` of both classes.

    Optimizers call it several times per parameter, so it checks the common cases first.
    """
    if func in _NOTED or len(types) > 1 or RUNNING.modules or (args[1:] and _is_grad_enabled()):
        return _looked_at(func, types, args, kwargs or {})
    return _disabled(func, types, args, kwargs or {})


def _looked_at(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if PieceGrad in types:
        return PieceGrad.__torch_function__(func, types, args, kwargs)
    is_recorded = _is_grad_enabled()
    if is_recorded and func in SUMS and not RUNNING.modules:
        total = whole_sum(func, args, kwargs)
        if total is not None:
            return total
    if RUNNING.modules or func in WATCHED:
        check(func, args, kwargs)
        if func in AS_NUMBER:
            return as_number(func, args[0])
    if is_recorded and len(args) + len(kwargs) > 1:  # reading an attribute would recurse
        check_mixed(func, args, kwargs)
    result = _disabled(func, types, args, kwargs)
    if func in KEEPING:
        return _like(args[:1], result)
    if func in ELEMENTWISE:
        return _like(args, result)
    if is_recorded and func in TAKING:
        refuse_backward(func, args, kwargs, result)
    return result


class PieceCopy(LocalRows):
    """Rows of a parameter copy; moves, conversions and arithmetic preserve this class."""

    _fsdpc_what = "a copy of a parameter"

    __torch_function__ = classmethod(on_rows)  # type: ignore[assignment]

    def full_tensor(self) -> torch.Tensor:
        """Gather the rows of all ranks' copies into one tensor; collective."""
        return gather_rows(self.to_local(), *self.home())

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = self.detach().clone().requires_grad_(self.requires_grad)
        return copied


def _like(args: Any, result: Any) -> Any:
    """Return the result as rows of the first argument's parameter."""
    if isinstance(result, (list, tuple)):
        if not isinstance(args[0], (list, tuple)):
            return result  # where(mask): indices of elements
        return type(result)(_like((a,), r) for a, r in zip(args[0], result, strict=True))
    for rows in args:
        if isinstance(rows, Part) and rows is not result and rows.shape == result.shape:
            return at_home(result, rows._fsdpc_home())
    return result


def at_home(rows: torch.Tensor, home: Home) -> PieceCopy:
    """Wrap a copy of a parameter's rows in a PieceCopy that shares its memory."""
    found = rows.as_subclass(PieceCopy)
    found._fsdpc = home
    return found
