"""Gradients of pieces: tensors of this rank's rows that report the whole gradient's norm.

A piece's gradient contains only this rank's rows, so the norm of a plain tensor would silently
differ between ranks. The engine therefore computes the norms over all ranks. The first read
computes the norms of all gradients of the model in one small collective. Later reads return those
results until the gradient changes. The decision to compute depends only on the program and never on
this rank's rows, so all ranks decide alike. All other operations behave as on a plain tensor.

If clipping has deferred a factor to the optimizer, any operation here applies it first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _foreach_utils

from fsdpc import _core
from fsdpc.torch import _device
from fsdpc.torch._reads import AS_NUMBER, ELEMENTWISE, KEEPING, RUNNING, WATCHED, check
from fsdpc.torch._rows import Home, LocalRows, Whole, as_number, gather_rows

if TYPE_CHECKING:
    from fsdpc.torch._unit import Root, UnitState

Held = tuple["UnitState", int, "PieceGrad"]
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Pending:
    """Live units whose gradients have a clipping factor that is still to be applied."""

    def __init__(self) -> None:
        self.states: weakref.WeakSet[UnitState] = weakref.WeakSet()
        self.any = False

    def add(self, states: Iterable[UnitState]) -> None:
        """Add units; every rank does this, whether or not it reads their gradients."""
        for state in states:
            self.states.add(state)
            self.any = True
            if state.root is not None:
                state.root.measured.outdate()

    def settle(self) -> None:
        self.any = False
        for state in self.states:
            state.torch_unit.apply_scale()
        self.states.clear()


class Measured:
    """Tracks which norms of a model are known, and whether the next miss computes one norm or all.

    If at least half of the norms are outdated, all of them are computed. With n gradients, this is
    checked once every n/8 misses, so a loop that changes each gradient after reading it takes
    linear time. Reads of known norms are not counted, because their number may differ between
    ranks.
    """

    def __init__(self) -> None:
        self.age: int = 0  # generation of gradients: results from earlier ones are invalid
        self.misses: int = 0

    def outdate(self) -> None:
        """Record that gradients changed without torch's knowledge."""
        self.age += 1
        self.misses = 0

    def is_known(self, grad: PieceGrad, order: float) -> bool:
        """Return whether the norm stored in a gradient is up to date."""
        known = grad._fsdpc_norm
        return known is not None and known[0] == (order, self.age, grad._version)

    def missing(self, one: Held, order: float, root: Root) -> list[Held]:
        """Return the gradients whose norms to compute if the norm of ``one`` is unknown."""
        if self.misses > 0:
            self.misses -= 1
            return [one]
        held = root.grads()
        if 2 * sum(not self.is_known(g, order) for _, _, g in held) >= len(held):
            return held
        self.misses = len(held) // 8
        return [one]


PENDING = _Pending()


class PieceGrad(LocalRows):
    """This rank's rows of a gradient, whose norms are those of the whole gradient."""

    _fsdpc_what = "a gradient"
    _fsdpc_cure = ", or take norm() of the gradient, which is the whole's"

    _fsdpc_of: PieceGrad | None = None  # its base if this is a view; they share the version
    _fsdpc_norm: tuple[Any, torch.Tensor] | None = None  # (order, age, version) and the norm

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if PENDING.any:
            PENDING.settle()
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if RUNNING.modules or func in WATCHED:
            check(func, args, kwargs or {})
            if func in AS_NUMBER:
                return as_number(func, args[0])
        result = _plain(func, args, kwargs or {})
        if func in _WRITES_LISTS:
            _count_writes(args[0])
        elif func in ELEMENTWISE:
            return _like(args, result)
        return result

    def full_tensor(self) -> torch.Tensor:
        """Gather the whole averaged gradient, or a whole tensor computed from it; collective."""
        state, index = self.home()
        if state.pieces[index].grad is not self:
            return gather_rows(self.to_local(), state, index)
        state.torch_unit.take_grads(index)
        return _device.gathered(state, index, True)

    def to_local(self) -> torch.Tensor:
        """Return the rows as a plain tensor, whose norm covers only them."""
        if PENDING.any:
            PENDING.settle()
        return super().to_local()

    _local_tensor = property(to_local)  # as in DTensor

    def __deepcopy__(self, memo: Any) -> PieceGrad:
        memo[id(self)] = copied = self.clone()  # torch's SGD keeps one as its momentum
        return copied


def as_piece_grad(rows: torch.Tensor, state: UnitState, index: int) -> PieceGrad:
    """Return rows as the gradient of parameter ``index``, with a version counter of their own."""
    return at_home(rows.data, (weakref.ref(state), index))


def at_home(rows: torch.Tensor, home: Home, of: PieceGrad | None = None) -> PieceGrad:
    """Return rows as a gradient of a parameter, sharing their memory."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = rows.as_subclass(PieceGrad)
    grad._fsdpc = home
    grad._fsdpc_of = of
    return grad


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``detach()`` and ``.data``, which share memory and version counter."""
    grad = args[0]
    of = grad if grad._fsdpc_of is None else grad._fsdpc_of
    return at_home(_plain(torch.Tensor.detach, (grad,), {}), grad._fsdpc, of)


def _keep(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation whose result, perhaps converted, is a gradient of the same parameter."""
    result = _plain(func, args, kwargs)
    if result is args[0] or not isinstance(args[0], PieceGrad):
        return result
    return at_home(result, args[0]._fsdpc)


def _like(args: tuple[Any, ...], result: Any) -> Any:
    """Return the result of elementwise arithmetic as rows of the gradient it was computed from.

    If one rank owns the whole parameter, the result is a plain tensor, because only that rank
    computes it (as in Muon).
    """
    if isinstance(result, (list, tuple)):
        if not isinstance(args[0], (list, tuple)):
            return result  # where(mask): indices of elements
        return type(result)(_like((g,), r) for g, r in zip(args[0], result, strict=True))
    for grad in args:
        if isinstance(grad, PieceGrad) and grad is not result and grad.shape == result.shape:
            state, index = grad.home()
            return result if index in state.whole else at_home(result, grad._fsdpc)
    return result


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
        check(func, args, kwargs)
        return _plain(func, args, kwargs)
    return global_norm(grad, _order(order))


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    tensors = args[0] if args else kwargs["self"]
    with torch._C.DisableTorchFunctionSubclass():
        norms: dict[int, torch.Tensor] = {}
        for held in _by_root(tensors):
            measured = _measure([each for _, each in held], _order(order))
            values = {d: measured.to(d).unbind() for d in {g.dtype for _, (_, _, g) in held}}
            norms |= {k: values[g.dtype][at] for at, (k, (_, _, g)) in enumerate(held)}
        if norms:  # for a list of one tensor, torch returns one element
            first = min(norms)
            norms[first] = norms[first].as_subclass(Whole)
        return [
            norms[k] if k in norms else torch.linalg.vector_norm(t, order)
            for k, t in enumerate(tensors)
        ]


def _by_root(tensors: Sequence[torch.Tensor]) -> Iterable[list[tuple[int, Held]]]:
    """Yield the gradients in a list with their positions, grouped by model."""
    found: dict[int, list[tuple[int, Held]]] = {}
    for k, grad in enumerate(tensors):
        if isinstance(grad, PieceGrad):
            state, index = grad.home()
            found.setdefault(id(state.root or state), []).append((k, (state, index, grad)))
    return found.values()


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement GradScaler's unscaling; an infinity on one rank is reported on all ranks."""
    _plain(func, args, kwargs)
    _count_writes(args[0])
    found = args[1]
    for grad in args[0]:
        if isinstance(grad, PieceGrad):
            for comm in grad.home()[0].comms:
                if comm.size > 1 and found.numel():
                    comm.all_reduce(_device.to_engine(found.detach()), "max")
            break


def _measure(grads: list[Held], order: float) -> torch.Tensor:
    """Compute whole gradients' norms exactly, in float64, from each rank's rows; collective."""
    values = _core.norms_of_rows(
        [state.unit for state, _, _ in grads],
        [index for _, index, _ in grads],
        [_device.to_engine(_dense(g)) for _, _, g in grads],
        order,
    )
    return torch.tensor(values, dtype=torch.float64, device=_device.home())


def _dense(grad: PieceGrad) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return grad.detach().as_subclass(torch.Tensor).contiguous()


def global_norm(grad: PieceGrad, order: float) -> torch.Tensor:
    """Return the norm of the whole gradient; collective, batched over the model's parameters."""
    state, index = grad.home()
    root = state.root
    own = state.pieces[index].grad
    of = grad if grad._fsdpc_of is None else grad._fsdpc_of
    with torch._C.DisableTorchFunctionSubclass():
        if root is None or of is not own:  # a copy is measured by itself
            return _measure([(state, index, grad)], order)[0].to(grad.dtype)
        measured = root.measured
        if not measured.is_known(own, order):
            stale = measured.missing((state, index, own), order, root)
            norms = _measure(stale, order)
            if all(g.dtype is grad.dtype for _, _, g in stale):
                norms = norms.to(grad.dtype)
            for (_, _, g), norm in zip(stale, norms.unbind()):
                g._fsdpc_norm = ((order, measured.age, g._version), norm.to(g.dtype))
        return own._fsdpc_norm[1].clone()  # type: ignore[union-attr, index]


def _count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Increment each tensor's version; list operations under FLOP counters, for example, do not."""
    torch.autograd.graph.increment_version([t for t in tensors if isinstance(t, PieceGrad)])


_WRITES_LISTS = frozenset(
    getattr(torch, name)
    for name in dir(torch)
    if name.startswith("_foreach_") and name.endswith("_")
)

_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(KEEPING, _keep),
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _vector_norm,
    torch.norm: _tensor_norm,
    torch.Tensor.norm: _tensor_norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.Tensor.detach: _view,
    torch.Tensor.data.__get__: _view,
}

# With this entry, clipping calls list operations; torch registers DTensor in the same way.
_foreach_utils._foreach_supported_types.append(PieceGrad)
