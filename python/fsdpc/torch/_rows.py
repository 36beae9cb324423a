"""Record in an optimizer's state dict which rows each tensor contains.

The keys are the same on all ranks, but each rank's tensors contain different rows. If the numbers
of rows match, a rank could load another rank's rows as its own. Tensors in a state dict therefore
carry their row range, which ``torch.save`` preserves. Loading checks the range, and
``torch.distributed.checkpoint`` saves and loads these tensors as shards of the full tensor.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdpc import distributed
from fsdpc.torch import _device
from fsdpc.torch._dcp import Part

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

#: Weak, because a piece references its gradient in C++, invisible to the cycle collector.
Home = tuple["weakref.ref[UnitState]", int]

#: The module of ``torch.save``, whose frames contain the file.
_SAVER = "torch.serialization"

#: Pickles tensors for other processes, such as that of torch's asynchronous saves.
_PROCESSES = "multiprocessing.reduction"


#: The engine's dtypes by size in bytes: rows are gathered as bits.
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Whole(torch.Tensor):
    """A norm or value that is already whole, with DTensor's methods; pickled as a plain tensor."""

    def full_tensor(self) -> torch.Tensor:
        """Return a plain tensor that shares the memory, without communication."""
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)


class LocalRows(Part, torch.Tensor):
    """This rank's rows of a parameter or of a similar tensor; pickled as a plain tensor."""

    _fsdpc: Home

    def home(self) -> tuple[UnitState, int]:
        """Return the unit state and the index of the parameter whose rows these are."""
        state, index = self._fsdpc[0](), self._fsdpc[1]
        if state is None:
            raise RuntimeError(
                "rows of a sharded parameter or gradient whose model was deleted: the other rows "
                "are gone, and with them the norm and the full value; keep the model"
            )
        return state, index

    def to_local(self) -> torch.Tensor:
        """Return the rows as a plain tensor, whose norm covers only them."""
        return self.as_subclass(torch.Tensor)

    def _fsdpc_home(self) -> Home:
        return self._fsdpc

    def _fsdpc_info(self) -> Any:
        state, index = self._fsdpc[0](), self._fsdpc[1]
        return None if state is None else state.pieces[index].fsdpc  # type: ignore[attr-defined]

    def _fsdpc_part(self) -> tuple[int, torch.Size]:
        state, index = self.home()
        info = state.pieces[index].fsdpc  # type: ignore[attr-defined]
        return info.rows[0], info.shape

    def __reduce_ex__(self, protocol: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != _PROCESSES:
            info = self._fsdpc_info()
            if info is not None and info.is_spread:
                check_file(str(info))
            return self.to_local().__reduce_ex__(protocol)
        return Rows._of(self._fsdpc_plain(), *self._fsdpc_part())._reduce_as(Rows)


def gather_rows(rows: torch.Tensor, state: UnitState, index: int) -> torch.Tensor:
    """Gather all ranks' rows, of any dtype, into the whole tensor; collective."""
    bits = rows.detach().contiguous().view(_BITS[rows.element_size()])
    return _device.gathered(state, index, bits).view(rows.dtype)


class _Sum(torch.autograd.Function):
    """A sum over ranks, whose gradient is passed unchanged to each rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, comm: Any) -> torch.Tensor:
        total = part.detach().clone()
        comm.all_reduce(_device.to_engine(total), "sum")
        return total

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


def whole_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the sum or mean of a whole tensor's elements, computed from its rows; collective.

    Return None for masks, sums along a dimension, and tensors that are already whole.
    """
    rows = args[0] if len(args) == 1 else None
    info = rows._fsdpc_info() if isinstance(rows, Part) and not kwargs.keys() - {"dtype"} else None
    if info is None or not info.is_spread or not rows.is_floating_point():  # type: ignore[union-attr]
        return None
    with torch._C.DisableTorchFunctionSubclass():
        total = _Sum.apply(torch.sum(rows, **kwargs), info._state.comms[0])
        return total if func.__name__ == "sum" else total / info.shape.numel()


def check_file(rows: str) -> None:
    """Raise if ``torch.save`` is writing rows to a file whose name does not contain the rank.

    Otherwise the checkpoint would contain only rank 0's rows, or all ranks would write one file.
    """
    frame = sys._getframe(2)
    for _ in range(16):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == _SAVER and frame.f_code.co_name == "save":
            file, rank = frame.f_locals.get("f"), distributed.rank()
            if isinstance(file, (str, os.PathLike)):
                name = "/".join(Path(file).parts[-2:])
                if str(rank) not in [n.lstrip("0") or n[:1] for n in re.findall(r"\d+", name)]:
                    raise NotImplementedError(
                        f"torch.save of {rows} to '{name}': rank {rank} has these rows only, and "
                        "other ranks have the others. get_model_state_dict() and "
                        "get_optimizer_state_dict() of fsdpc.torch have whole values, and "
                        "fsdpc.checkpoint saves them; to save each rank's rows by itself, put the "
                        f"rank's number into the file's name, as in 'rank{rank}.pt'"
                    )
            return
        frame = frame.f_back  # type: ignore[assignment]


def as_number(func: Any, rows: Any) -> Any:
    """Implement ``float()`` and the like for one-element parameters; collective if sharded.

    Raises
    ------
    RuntimeError
        The parameter has more than one element.
    """
    info = rows._fsdpc_info()
    if info is None or not info.is_cut:
        return func(rows._fsdpc_plain())
    if info.shape.numel() != 1:
        raise RuntimeError(
            f"a Tensor with {info.shape.numel()} elements cannot be converted to Scalar: this rank "
            f"has {info}; full_tensor() has all"
        )
    return func(gather_rows(rows._fsdpc_plain(), info._state, info._index))


class Rows(LocalRows):
    """A state dict tensor that shares a plain tensor's memory; operations return plain tensors."""

    fsdpc_rows: str
    _begin: int
    _whole: torch.Size

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def _of(rows: torch.Tensor, begin: int, whole: torch.Size) -> Rows:
        marked = rows.as_subclass(Rows)
        marked._begin, marked._whole = begin, whole
        end = begin + (len(rows) if rows.dim() and rows.numel() else 0)
        marked.fsdpc_rows = f"rows {begin}:{end} of {tuple(whole)}"
        return marked

    def _fsdpc_info(self) -> Any:
        return None

    def _fsdpc_part(self) -> tuple[int, torch.Size]:
        return self._begin, self._whole

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert like any tensor; the result keeps this class and its row range."""
        return Rows._of(plain(self).to(*args, **kwargs), self._begin, self._whole)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        memo[id(self)] = copied = Rows._of(plain(self).clone(), self._begin, self._whole)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor with its row range, which ``weights_only`` also loads."""
        if sys._getframe(1).f_globals.get("__name__") == _PROCESSES:
            return self._reduce_as(Rows)
        check_file(f"a state of {self.fsdpc_rows}")
        return self._reduce_as(torch.Tensor)

    def _reduce_as(self, kind: type) -> Any:
        made, args = plain(self)._reduce_ex_internal(2)
        state = dict(self.__dict__) if kind is Rows else {"fsdpc_rows": self.fsdpc_rows}
        return torch._tensor._rebuild_from_type_v2, (made, kind, args, state)


def plain(value: Any) -> Any:
    """Return a tensor without its row range, sharing its memory; return other values unchanged."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Rows) else value


def _spread(p: Any) -> Any:
    """Return information about a parameter's rows, or None if each rank has all of them."""
    info = getattr(p, "fsdpc", None)
    return info if info is not None and info.is_spread else None


def mark(p: Any, value: Any) -> Any:
    """Return a parameter's state, marked with its row range if it contains rows."""
    info = _spread(p)
    if info and isinstance(value, torch.Tensor) and value.dim() and value.shape == p.shape:
        return Rows._of(plain(value), info.rows[0], info.shape)
    return value


def check(p: Any, key: str, value: Any) -> Any:
    """Return a state without its row range; raise if the range is not the parameter's.

    Raises
    ------
    ValueError
        The error names both row ranges.
    """
    info = _spread(p)
    rows = "rows {}:{} of {}".format(*info.rows, tuple(info.shape)) if info else None
    theirs = getattr(value, "fsdpc_rows", rows) if isinstance(value, torch.Tensor) else rows
    if theirs != rows and value.shape == p.shape:
        raise ValueError(
            f"'{key}' in the state dict is of {theirs}, and this rank has "
            f"{getattr(p, 'fsdpc', 'a parameter that is not cut')}: give each rank its own "
            "state_dict(), or load with set_optimizer_state_dict() or fsdpc.checkpoint"
        )
    return plain(value)


def params_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters in its state dict's order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def keys_of(state_dict: dict[str, Any]) -> list[Any]:
    """Return the parameters' keys in an optimizer's state dict, in order.

    Keys are indices, or names if ``torch.distributed.checkpoint.state_dict`` created the dict.
    """
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def mark_all(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Mark the rows in an optimizer's ``state_dict()``; used as a torch hook."""
    return _changed(optimizer, state_dict, lambda p, _, value: mark(p, value))


def check_all(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check that a state dict contains this rank's rows, and remove the marks; a hook for torch."""
    return _changed(optimizer, state_dict, check)


def _changed(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    change: Callable[[Any, str, Any], Any],
) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for key, p in zip(keys_of(state_dict), params_of(optimizer), strict=False):
        if key in states:
            states[key] = {k: change(p, k, value) for k, value in states[key].items()}
    return {**state_dict, "state": states}
