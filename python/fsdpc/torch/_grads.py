"""Gradients of pieces: tensors over this rank's rows that answer norms for the whole parameter.

A piece's gradient holds this rank's rows alone, so ``p.grad.norm()`` of a plain tensor would
quietly be another number on every rank. Here norms are global: the first one that is asked for
computes those of all parameters of the model and joins them in one small collective; the others
read its result while no gradient changes. Everything else is a plain tensor's.

Clipping may have left a factor for the optimizer to apply; any operation here applies it first.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fsdpc.torch import _device

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Pending:
    """Units, while they live, whose gradients clipping left to be scaled."""

    def __init__(self) -> None:
        self.states: weakref.WeakSet[UnitState] = weakref.WeakSet()

    def settle(self) -> None:
        for state in self.states:
            state.door.apply_scale()
        self.states.clear()


PENDING = _Pending()


class PieceGrad(torch.Tensor):
    """This rank's rows of a gradient, whose norms are those of the whole."""

    # Weak: a piece holds its gradient in C++, where the collector of cycles does not look.
    _fsdpc: tuple[weakref.ref[UnitState], int]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if PENDING.states:
            PENDING.settle()
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def full_tensor(self) -> torch.Tensor:
        """Return the whole averaged gradient; collective.

        Raises
        ------
        RuntimeError
            This is not the parameter's gradient any more.
        """
        state, index = _home(self)
        if state.pieces[index].grad is not self:
            raise RuntimeError(
                f"full_tensor() of what was a gradient of {state.pieces[index].fsdpc}: "  # type: ignore[attr-defined]
                "ask the parameter's .grad itself"
            )
        state.door.take_grads()
        return _device.to_torch(state.unit.collect(index, True))

    def to_local(self) -> torch.Tensor:
        """Return this rank's rows as a plain tensor, whose norm is theirs alone."""
        PENDING.settle()
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def as_piece_grad(rows: torch.Tensor, state: UnitState, index: int) -> PieceGrad:
    """Return the rows as a gradient of parameter ``index``."""
    return _at_home(rows, (weakref.ref(state), index))


def _at_home(rows: torch.Tensor, home: tuple[weakref.ref[UnitState], int]) -> PieceGrad:
    with torch._C.DisableTorchFunctionSubclass():
        grad = rows.as_subclass(PieceGrad)
    grad._fsdpc = home
    return grad


def _home(grad: PieceGrad) -> tuple[UnitState, int]:
    """The unit's state and the parameter that a gradient is of."""
    state = grad._fsdpc[0]()
    if state is None:
        raise RuntimeError(
            "a sharded gradient whose model was deleted has no norm and no full value: the other "
            "rows are gone"
        )
    return state, grad._fsdpc[1]


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _keep(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations whose result still is the gradient, of another type or without history."""
    result = _plain(func, args, kwargs)
    if result is args[0] or not isinstance(args[0], PieceGrad):
        return result
    return _at_home(result, args[0]._fsdpc)


def _order(value: Any) -> float:
    if value is None or value == "fro":
        return 2.0
    if isinstance(value, str):
        raise ValueError(f"norm '{value}' of a sharded gradient: give a number")
    return float(value)


def _is_over_all(dim: Any, grad: torch.Tensor) -> bool:
    return dim is None or (isinstance(dim, (tuple, list)) and len(dim) == grad.dim())


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("x", "ord", "dim", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    return _norm(func, args, kwargs, given.get("ord", 2), given.get("dim"))


def _tensor_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "p", "dim", "keepdim", "dtype")
    given = dict(zip(names, args, strict=False)) | kwargs
    return _norm(func, args, kwargs, given.get("p", "fro"), given.get("dim"))


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], order: Any, dim: Any) -> Any:
    grad = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(grad, PieceGrad):
        return _plain(func, args, kwargs)
    if not _is_over_all(dim, grad):
        state, index = _home(grad)
        if not state.pieces[index].fsdpc.is_cut:  # type: ignore[attr-defined]
            return _plain(func, args, kwargs)
        raise NotImplementedError(
            f"the norm of a sharded gradient over dim={dim}: this rank has some of the rows only; "
            "use the gradient of full_tensor(), or the norm over all dimensions"
        )
    return global_norm(grad, _order(order))


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    tensors = args[0] if args else kwargs["self"]
    return [
        global_norm(g, _order(order))
        if isinstance(g, PieceGrad)
        else torch.linalg.vector_norm(g, order)
        for g in tensors
    ]


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GradScaler's: infinities on any rank count on all."""
    _plain(func, args, kwargs)
    found = args[1]
    for grad in args[0]:
        if isinstance(grad, PieceGrad):
            _reduce(_home(grad)[0], found, "max")
            break


def _reduce(state: UnitState, values: torch.Tensor, op: str) -> None:
    for comm in state.comms:
        if comm.size > 1 and values.numel():
            comm.all_reduce(_device.to_engine(values.detach()), op)


def _joined(local: torch.Tensor, order: float, state: UnitState) -> torch.Tensor:
    """Global norms of several tensors from this rank's, in float64; collective."""
    shard = state.comms[:1]  # replicas hold the same rows
    if order == math.inf or order == -math.inf:
        op, values = ("max" if order > 0 else "min"), local.double()
    else:
        op, values = "sum", (local.double() ** order if order else local.double())
    for comm in shard:
        if comm.size > 1:
            comm.all_reduce(_device.to_engine(values), op)
    finite = order not in (math.inf, -math.inf, 0.0)
    return values ** (1.0 / order) if finite else values


def _local_norm(grad: torch.Tensor, order: float) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if grad.numel() == 0:
            nothing = math.inf if order < 0 else 0.0
            return torch.tensor(nothing, dtype=grad.dtype, device=grad.device)
        return torch.linalg.vector_norm(grad, order)


def global_norm(grad: PieceGrad, order: float) -> torch.Tensor:
    """Return the norm of the whole gradient; collective, batched over the model's parameters."""
    state, index = _home(grad)
    root = state.root
    piece = state.pieces[index]
    if root is None or piece.grad is not grad:
        if grad.data_ptr() != state.grads[index].data_ptr():  # a copy of one gradient: alone
            local = _local_norm(grad, order).reshape(1)
            return _joined(local, order, state)[0].to(grad.dtype)
    assert root is not None
    held = [
        (p.grad, (id(s), i))
        for s in root.states
        for i, p in enumerate(s.pieces)
        if isinstance(p.grad, PieceGrad)
    ]
    versions = tuple(g._version for g, _ in held)
    key = (order, root.backwards, versions)
    if root.norms is None or root.norms[0] != key:
        local = torch.stack([_local_norm(g, order).double() for g, _ in held])
        values = _joined(local, order, state)
        root.norms = (key, {place: values[k] for k, (_, place) in enumerate(held)})
    return root.norms[1][id(state), index].to(grad.dtype)


_HANDLERS: dict[Any, Handler] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _vector_norm,
    torch.norm: _tensor_norm,
    torch.Tensor.norm: _tensor_norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.Tensor.detach: _keep,
    torch.Tensor.data.__get__: _keep,
    torch.Tensor.to: _keep,
    torch.Tensor.float: _keep,
    torch.Tensor.double: _keep,
    torch.Tensor.clone: _keep,
}
