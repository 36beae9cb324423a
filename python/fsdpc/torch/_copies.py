"""Copies of pieces, and values of state dicts, that answer ``full_tensor()`` as DTensors do."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdpc.torch import _device
from fsdpc.torch._rows import Home, LocalRows

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState


class Whole(torch.Tensor):
    """A norm or a value that is whole already, as good as a DTensor; in files a plain tensor."""

    def full_tensor(self) -> torch.Tensor:
        """Return the same memory as a plain tensor; communicates nothing."""
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)


class FullValue(Whole):
    """A full value in a state dict; what operations make of it is plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = self.clone().as_subclass(FullValue)
        return copied


class PieceCopy(LocalRows):
    """Rows of a copy of a parameter; moved, converted and copied it still is that."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _KEEP and isinstance(args[0], PieceCopy) and result is not args[0]:
            return _at_home(result, args[0]._fsdpc)
        return result

    def full_tensor(self) -> torch.Tensor:
        """Return the rows of all ranks' copies as one tensor; collective."""
        return gather_rows(self.to_local(), *self.home())

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = copied = self.detach().clone().requires_grad_(self.requires_grad)
        return copied


_KEEP = {
    torch.Tensor.clone, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.data.__get__,
    torch.Tensor.detach, torch.Tensor.double, torch.Tensor.float, torch.Tensor.to, torch.clone,
}  # fmt: skip


#: Dtypes of the engine, by their size in bytes: rows are gathered as bits.
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def _at_home(rows: torch.Tensor, home: Home) -> PieceCopy:
    found = rows.as_subclass(PieceCopy)
    found._fsdpc = home
    return found


def offer_copies(piece: Any, state: UnitState, index: int) -> None:
    """Let copies that a piece makes know what they are rows of."""
    home = (weakref.ref(state), index)
    for name in ("detach", "clone", "__deepcopy__"):
        setattr(piece, name, partial(_copy, piece, home, name))


def _copy(piece: Any, home: Home, name: str, *args: Any, **kwargs: Any) -> Any:
    return _at_home(getattr(nn.Parameter, name)(piece, *args, **kwargs), home)


def gather_rows(rows: torch.Tensor, state: UnitState, index: int) -> torch.Tensor:
    """Return the tensor, of any dtype, of which every rank has its rows; collective."""
    bits = rows.detach().contiguous().view(_BITS[rows.element_size()])
    return _device.to_torch(state.unit.collect(index, _device.to_engine(bits))).view(rows.dtype)
