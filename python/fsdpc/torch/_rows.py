"""State dicts of optimizers over pieces say which rows they are of.

Their tensors are rows that no two ranks share, under keys that all ranks share. Loaded on another
rank, they would be other rows' states wherever the counts fit, and ``torch.distributed.checkpoint``
keeps one rank's of each key. So tensors of a state dict carry the rows, also through
``torch.save``: loading compares them, and torch's checkpoints are refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

#: Weak: a piece holds its gradient in C++, where the collector of cycles does not look.
Home = tuple["weakref.ref[UnitState]", int]

_READERS = ("torch.distributed.checkpoint", "torch.distributed._state_dict_utils")


def refuse_checkpoint(rows: str, *_: Any) -> NoReturn:
    """Raise what torch.distributed.checkpoint is told that was given rows."""
    raise NotImplementedError(
        f"torch.distributed.checkpoint takes {rows} for the whole, and would keep one rank's: use "
        "fsdpc.checkpoint, or give it what get_model_state_dict and get_optimizer_state_dict of "
        "fsdpc.torch return"
    )


class LocalRows(torch.Tensor):
    """This rank's rows of a parameter or of something like it; in files a plain tensor."""

    _fsdpc: Home

    def home(self) -> tuple[UnitState, int]:
        """Return the unit's state and the number of the parameter that has such rows."""
        state, index = self._fsdpc[0](), self._fsdpc[1]
        if state is None:
            raise RuntimeError(
                "rows of a sharded parameter or gradient whose model was deleted: the other rows "
                "are gone, and with them the norm and the full value; keep the model"
            )
        return state, index

    def to_local(self) -> torch.Tensor:
        """Return the rows as a plain tensor, whose norm is theirs alone."""
        return self.as_subclass(torch.Tensor)

    def __create_write_items__(self, *_: Any) -> NoReturn:
        refuse_checkpoint(getattr(self, "fsdpc_rows", "rows of a parameter"))

    __create_chunk_list__ = __create_write_items__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_local().__reduce_ex__(protocol)


class Rows(LocalRows):
    """A tensor of a state dict, over the memory of a plain one; operations give plain ones."""

    fsdpc_rows: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def size(self, *args: Any, **kwargs: Any) -> Any:
        """As of any tensor; what copies states for torch's checkpoints asks for it first."""
        if str(sys._getframe(1).f_globals.get("__name__")).startswith(_READERS):
            refuse_checkpoint(self.fsdpc_rows)
        return super().size(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return _marked(plain(self).clone(), self.fsdpc_rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor that has the attribute, which ``weights_only`` loads too."""
        made, args = plain(self)._reduce_ex_internal(protocol)
        state = {"fsdpc_rows": self.fsdpc_rows}
        return torch._tensor._rebuild_from_type_v2, (made, torch.Tensor, args, state)


def _marked(value: torch.Tensor, rows: str) -> torch.Tensor:
    value = value.as_subclass(Rows)
    value.fsdpc_rows = rows  # type: ignore[attr-defined]
    return value


def plain(value: Any) -> Any:
    """Return a tensor without its mark, over the same memory; anything else as it is."""
    return value.as_subclass(torch.Tensor) if isinstance(value, Rows) else value


def _rows_of(p: Any) -> str | None:
    """Which rows a piece has; None for a parameter that is not cut."""
    info = getattr(p, "fsdpc", None)
    if not getattr(info, "is_cut", False):
        return None
    begin, end = info.rows
    return f"rows {begin}:{end} of {tuple(info.shape)}"


def mark(p: Any, value: Any) -> Any:
    """Return a state of a parameter, marked if it is rows."""
    rows = _rows_of(p)
    if rows and isinstance(value, torch.Tensor) and value.dim() and value.shape == p.shape:
        return _marked(plain(value), rows)
    return value


def check(p: Any, key: str, value: Any) -> Any:
    """Return a state without its mark; raise if it is of other rows than the parameter.

    Raises
    ------
    ValueError
        Names both.
    """
    rows = _rows_of(p)
    theirs = getattr(value, "fsdpc_rows", rows) if isinstance(value, torch.Tensor) else rows
    if theirs != rows and value.shape == p.shape:
        raise ValueError(
            f"'{key}' in the state dict is of {theirs}, and this rank has "
            f"{getattr(p, 'fsdpc', 'a parameter that is not cut')}: give each rank its own "
            "state_dict(), or load with set_optimizer_state_dict() or fsdpc.checkpoint"
        )
    return plain(value)


def params_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's parameters in the order by which its state dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def mark_all(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's ``state_dict()`` with its rows marked; a hook of torch's."""
    return _changed(optimizer, state_dict, lambda p, _, value: mark(p, value))


def check_all(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be loaded without marks, if each is this rank's; a hook of torch's."""
    return _changed(optimizer, state_dict, check)


def _changed(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    change: Callable[[Any, str, Any], Any],
) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for i, p in enumerate(params_of(optimizer)):
        if i in states:
            states[i] = {key: change(p, key, value) for key, value in states[i].items()}
    return {**state_dict, "state": states}
