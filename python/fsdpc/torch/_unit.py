"""Units of torch parameters: pieces, unsharded parameters, and the root that joins units.

The engine owns the memory, and the tensors here are views of it that are created only once. Pieces
and their gradients are created with the unit, and unsharded parameters when the root exists.
TorchUnit (csrc/bind/torch/unit.h) does each step's work; this file runs only at setup or once per
backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import optimizer as _optimizer

from fsdpc import _core
from fsdpc.sharding.rules import Found, Inside, enclosing, name_units, outermost, sharded_modules
from fsdpc.torch import _device
from fsdpc.torch._buffers import fill_blank
from fsdpc.torch._copies import PieceCopy, on_rows
from fsdpc.torch._copies import at_home as copy_at_home
from fsdpc.torch._dcp import Part
from fsdpc.torch._drawn import check_drawn
from fsdpc.torch._grads import Measured, PieceGrad, as_piece_grad, at_home
from fsdpc.torch._recipe import Recipe
from fsdpc.torch._rows import Home, Rows
from fsdpc.torch.kernels import target
from fsdpc.torch.policies import MixedPrecisionPolicy

Slot = tuple[dict[str, Any], str, int]

_grad: Any = torch._C.TensorBase.grad  # as a descriptor
_unwatched: Callable[..., Any] = torch._C._disabled_torch_function_impl
_plainly: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
_BECOME_GRADS = frozenset({torch.Tensor, nn.Parameter, PieceCopy, Rows})

_SPLIT_BACKWARD = "torch.distributed.pipelining._backward"
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
set_version: Callable[[tuple[Any, ...], tuple[int, ...]], None]
set_version = torch._C._autograd._unsafe_set_version_counter
try:
    set_version((torch.empty(0),), (0,))
except TypeError:  # torch 2.6 and older accept one tensor

    def set_version(bases: tuple[Any, ...], versions: tuple[int, ...]) -> None:
        for base, version in zip(bases, versions, strict=True):
            torch._C._autograd._unsafe_set_version_counter(base, version)


class PieceInfo:
    """Describes a piece: its parameter's ``name`` and full ``shape``, and ``rows`` (begin, end).

    ``is_cut`` is whether its rows are divided among ranks; otherwise one rank has all of them.
    ``is_spread`` is whether other ranks have different rows, or none.
    """

    def __init__(self, state: UnitState, index: int, name: str, shape: torch.Size) -> None:
        self._state, self._index, self._name = state, index, name
        self.shape = shape
        self.is_spread = state.comms[0].size > 1
        self.is_cut = self.is_spread and index not in state.whole
        self.home: Home = (weakref.ref(state), index)
        _, _, first, numel, *_ = state.places[index]
        row = max(1, shape[1:].numel()) if len(shape) else 1
        self.rows = (first // row, -(-(first + numel) // row))

    @property
    def name(self) -> str:
        """The dotted name, complete once the outermost module has been called."""
        return f"{self._state.unit.name}.{self._name}"

    @property
    def unit(self) -> _core.Unit:
        """The unit that the parameter belongs to."""
        return self._state.unit

    def __repr__(self) -> str:
        begin, end = self.rows
        return f"rows {begin}:{end} of '{self.name}' {tuple(self.shape)}"

    def __deepcopy__(self, memo: Any) -> PieceInfo:
        return self


class Piece(Part, nn.Parameter):
    """A piece of a parameter; any tensor assigned to ``.grad`` becomes rows of a gradient.

    Operations on it are checked first (``_reads.py``).
    """

    fsdpc: PieceInfo

    __torch_function__ = classmethod(on_rows)  # type: ignore[assignment]

    def _fsdpc_info(self) -> PieceInfo | None:
        return self.__dict__.get("fsdpc")  # None during construction

    def _fsdpc_home(self) -> Home:
        return self.fsdpc.home

    def _fsdpc_part(self) -> tuple[int, torch.Size]:
        return self.fsdpc.rows[0], self.fsdpc.shape

    def _fsdpc_plain(self) -> torch.Tensor:
        if self.is_meta:
            raise RuntimeError(f"{self.fsdpc} is on the meta device, and has no values to save")
        return super()._fsdpc_plain()

    def _fsdpc_staged(self, made: torch.Tensor) -> NoReturn:
        raise NotImplementedError(
            f"torch.distributed.checkpoint.async_save of {self.fsdpc}, the parameter itself: give "
            "it get_model_state_dict(model, sharded=True), which has the same memory"
        )

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return a view; raise in pipeline schedules that compute weight gradients separately.

        These schedules find a weight in autograd's graph through a view. Pieces are never in the
        graph, so they would get no gradients.
        """
        if sys._getframe(1).f_globals.get("__name__") == _SPLIT_BACKWARD:
            raise NotImplementedError(
                f"a pipeline schedule that splits backward, with {self.fsdpc}: "
                "ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble and ScheduleDualPipeV find "
                "weights in autograd's graph, which a sharded parameter is not in, and would leave "
                "it without a gradient. Use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
            )
        return super().view_as(other)

    def _get_grad(self) -> Any:
        value = _unwatched(_grad.__get__, (), (self,))
        if type(value) is torch.Tensor:  # from a backward without a forward
            self._set_grad(value)
            return self._get_grad()
        return value

    def _set_grad(self, value: Any) -> None:
        if type(value) in _BECOME_GRADS:
            value = at_home(value, self.fsdpc.home)
        _unwatched(_grad.__set__, (), (self, value))

    grad = property(_get_grad, _set_grad, _grad.__delete__)  # type: ignore[assignment]

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise an error, because the reductions that create gradients do not run tensor hooks."""
        raise NotImplementedError(
            f"register_hook on {self.fsdpc}, where it would never run: "
            "register_post_accumulate_grad_hook runs when the rows have their gradient"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy_at_home(self._fsdpc_plain(), self.fsdpc.home).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> PieceCopy:
        copied = copy_at_home(self._fsdpc_plain().clone(), self.fsdpc.home)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied


class BarePiece(Piece):
    """A piece of a meta-device parameter, until ``to_empty()`` is called or it gets values.

    The engine has already allocated its memory; the piece only claims to be on the meta device.
    """

    device = torch.device("meta")
    is_meta = True


class UnitState:
    """The data of a sharded module: its Unit and TorchUnit, its tensors and its options."""

    def __init__(
        self, recipe: Recipe, params: Found, dtypes: list[torch.dtype], readers: Inside
    ) -> None:
        self.recipe: Recipe = recipe
        self.modules: list[nn.Module] = recipe.modules
        self.policy: MixedPrecisionPolicy = recipe.policy
        self.comms: list[_core.Comm] = recipe.where.comms
        self.whole: frozenset[int] = recipe.whole
        self.root: Root | None = None
        self.summoned: bool = False  # parameters are private full copies
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # those that step the unit
        self.names: list[str] = recipe.names
        self.shapes: list[torch.Size] = recipe.shapes
        self.missing: set[int] = {i for i, (_, p, _) in enumerate(params) if p.is_meta}
        # (name, dictionary, key, reference) of buffers that to_empty() created
        self.blank_buffers: list[tuple[str, dict[str, Any], str, Any]] = []
        self.attributes: list[dict[str, Any]] = [dict(p.__dict__) for _, p, _ in params]
        self.slots: list[Slot] = [
            (owner, key, i) for i, (_, _, at) in enumerate(params) for owner, key in at
        ]
        self.pieces: list[BarePiece | Piece] = [
            kind(torch.empty(0, device=_device.home()), p.requires_grad)
            for kind, p in ((BarePiece if p.is_meta else Piece, p) for _, p, _ in params)
        ]
        self.guards: list[tuple[dict[str, Any], partial[Any]]] = [
            (m.__dict__, partial(_refuse_call, self, path.rstrip(".")))
            for path, m in readers
            if type(m).forward is not nn.Module.forward
        ]
        self.unsharded: list[nn.Parameter] = []
        self.known: list[tuple[dict[str, Any], str]] = []  # former places of parameters
        self.when_rooted: list[Callable[[], None]] = []
        self.cast_to: torch.dtype | None = (
            self.policy.param_dtype if self.policy.cast_forward_inputs else None
        )
        self.stand_on(recipe.make(dtypes), dtypes)
        for owner, key, i in self.slots:
            owner[key] = self.pieces[i]

    def stand_on(self, unit: _core.Unit, dtypes: list[torch.dtype]) -> None:
        """Make pieces views of this unit's masters, and create its TorchUnit."""
        self.unit: _core.Unit = unit
        self.dtypes: list[torch.dtype] = dtypes
        self.places: list[tuple[int, int, int, int, int, int]] = _core.unit_places(unit)
        self.masters: list[torch.Tensor] = [
            _device.to_torch(m) for m in _core.unit_memory(unit, "master")
        ]
        self.rows: list[torch.Tensor] = [
            self._rows(self.masters, i, self.places[i][5]) for i in range(len(self.pieces))
        ]
        self.is_narrow: bool = any(m.dtype.itemsize < torch.float32.itemsize for m in self.masters)
        for i, piece in enumerate(self.pieces):
            piece.grad = None
            piece.data = self.rows[i]
            self._describe(i, piece)
        self.trusted: list[int] = [piece._version for piece in self.pieces]
        self.torch_unit: _core.TorchUnit = _core.TorchUnit(
            unit,
            self.slots,
            self.pieces,
            self.adopt,
            self._make_grads,
            _device.streams(),
            _device.takes_back(),
            _plainly,
            _grad,
        )
        self.torch_unit.guard(self.guards)
        self._make_grads()

    @property
    def is_running(self) -> bool:
        """Return whether the unit is inside its forward or backward."""
        return bool(self.torch_unit.depth or self.torch_unit.in_backward)

    def _rows(self, flats: list[torch.Tensor], i: int, offset: int) -> torch.Tensor:
        group, _, _, numel, *_ = self.places[i]
        if group >= len(flats):  # a frozen group has no gradients
            return self.masters[group].new_empty(0)
        return flats[group][offset : offset + numel].view(self.unit.local(i).shape)

    def _make_grads(self) -> None:
        """Allocate new gradient memory; earlier gradients that a caller has kept stay valid."""
        flats = _device.grad_memory(self.unit, self.masters)
        self.lent: list[_device.Lent] = [_device.Lent(flat) for flat in flats or ()]
        if flats is None:
            flats = [_device.to_torch(m) for m in _core.unit_memory(self.unit, "grad")]
        grads = [
            as_piece_grad(self._rows(flats, i, self.places[i][4]), self, i)
            for i in range(len(self.pieces))
        ]
        del flats
        for one in self.lent:
            one.users = one.count_users()
        self.torch_unit.place(grads, self.lent or None)

    def _describe(self, i: int, piece: nn.Parameter) -> None:
        piece.__dict__.update(self.attributes[i])
        piece.fsdpc = PieceInfo(self, i, self.names[i], self.shapes[i])  # type: ignore[attr-defined]
        piece.full_tensor = partial(full_value, self, i)  # type: ignore[attr-defined]
        piece.to_local = partial(_local, piece)  # type: ignore[attr-defined]
        piece.is_contiguous = partial(_is_contiguous, piece)  # type: ignore[method-assign]
        piece._local_tensor = self.rows[i]  # type: ignore[attr-defined]  # as DTensors have

    def write(self, i: int, full: torch.Tensor) -> None:
        """Write this rank's rows of a full value into the piece."""
        self.torch_unit.follow(i)  # otherwise a replaced `.data` would be adopted later
        self.unit.write(i, _device.to_engine(full.detach().contiguous()))
        self.trust(i)

    def trust(self, i: int) -> None:
        """Record that a piece's values came from a full value."""
        self.missing.discard(i)
        self.give_memory(i)
        self.trusted[i] = self.pieces[i]._version

    def give_memory(self, i: int) -> None:
        """Make a piece report its real device, so that it has an address."""
        self.pieces[i].__class__ = Piece

    def written(self) -> list[int]:
        """Return the pieces that have been written since their rows last came from a full value."""
        return [i for i, p in enumerate(self.pieces) if p._version != self.trusted[i]]

    def check_slots(self) -> None:
        """Raise if a parameter has been replaced with another object."""
        for owner, key, i in self.slots:
            value = owner.get(key)
            own = (self.pieces[i], *self.unsharded[i : i + 1])
            if all(value is not p for p in own):
                raise RuntimeError(
                    f"parameter '{self.names[i]}' of unit '{self.unit.name}' was replaced by a "
                    f"{type(value).__name__} after fully_shard (by another fully_shard, or a "
                    "parametrization): do that before, or copy into it under no_grad()"
                )

    def show(self, unsharded: Sequence[nn.Parameter] | None) -> None:
        """Put full copies into modules and let them be called, or restore the pieces if given None.

        If given the pieces themselves, mark them as summoned and keep the modules from being
        called.
        """
        if not self.summoned:
            if unsharded is None:
                return
            self.check_slots()
        for owner, key, i in self.slots:
            owner[key] = (unsharded or self.pieces)[i]
        self.summoned = unsharded is not None
        self.torch_unit.lift(self.summoned and unsharded is not self.pieces)

    def standing(self, copies: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the private copies that modules have now; raise if a replacement does not fit."""
        found = list(copies)
        for owner, key, i in self.slots:
            value = owner.get(key)
            if value is not copies[i] or value.shape != self.shapes[i]:
                if not isinstance(value, torch.Tensor) or value.shape != self.shapes[i]:
                    raise RuntimeError(
                        f"parameter '{self.names[i]}' of unit '{self.unit.name}' was "
                        f"{tuple(self.shapes[i])} at fully_shard() and now is "
                        f"{tuple(getattr(value, 'shape', ())) or type(value).__name__}: resize "
                        "or take out parameters before fully_shard()"
                    )
                found[i] = value
        return found

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Convert summoned copies to the compute dtype inside the context."""
        dtype = self.policy.param_dtype
        copies = [owner[key] for owner, key, _ in self.slots]
        try:
            for (owner, key, _), p in zip(self.slots, copies, strict=True):
                owner[key] = p if dtype in (None, p.dtype) else nn.Parameter(p.to(dtype), False)
            yield
        finally:
            for (owner, key, _), p in zip(self.slots, copies, strict=True):
                owner[key] = p

    def adopt(self, i: int) -> None:
        """Copy the tensor that was assigned to a piece's ``.data`` into the piece's memory."""
        piece, rows = self.pieces[i], self.rows[i]
        if piece.shape != rows.shape:
            raise ValueError(
                f"the .data of a parameter was replaced by {tuple(piece.shape)}, and this rank "
                f"has {piece.fsdpc}, {tuple(rows.shape)}: give it these rows, "  # type: ignore[attr-defined]
                "or write full values inside summon_full_params() or by load_state_dict()"
            )
        with torch.no_grad():
            rows.copy_(piece.data)
            piece.data = rows
        self.give_memory(i)

    def bind(self, root: Root) -> None:
        """Create the unsharded parameters after the parameter buffer has been created."""
        self.root = root
        with torch.inference_mode(False), torch.no_grad():
            flats = _core.unit_memory(self.unit, "unsharded")
            lends = self.torch_unit.lends_unsharded
            bases = tuple((_device.like if lends else _device.to_torch)(m) for m in flats)
            lent = [_device.Lent(base) for base in bases] if lends else None
            for i, shape in enumerate(self.shapes):
                group, offset, *_ = self.places[i]
                values = bases[group][offset : offset + shape.numel()].view(shape)
                full = nn.Parameter(values, requires_grad=False)
                full.__dict__.update(self.attributes[i])
                target(full, self, i)
                self.unsharded.append(full)
            for one in lent or ():
                one.give()
        at_end, units = root.at_end, root.torch_units
        self.torch_unit.bind(self.unsharded, bases, lent, set_version, at_end, units)


# Optimizers check these types to decide whether to use list operations; torch registers DTensor
# here too.
_optimizer._foreach_supported_types.append(Piece)


@contextmanager
def on_copies(
    states: Sequence[UnitState], copies: Sequence[Sequence[nn.Parameter]]
) -> Iterator[Callable[[], list[list[nn.Parameter]]]]:
    """Put private copies of the units' parameters into modules; restore the pieces on exit.

    Yields a function that returns the current copies, including replacements.
    """
    try:
        for state, own in zip(states, copies, strict=True):
            state.show(own)
        yield lambda: [s.standing(own) for s, own in zip(states, copies, strict=True)]
    finally:
        for state in states:
            state.show(None)


def _refuse_call(state: UnitState, path: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"'{state.unit.name}.{path}' was called outside of the forward of its unit, where its "
        "parameters are this rank's rows: call the sharded module around it, make the calling "
        "method one with register_fsdp_forward_method(), or call unshard() before and reshard() "
        "after"
    )


def _local(piece: nn.Parameter) -> nn.Parameter:
    return piece


def _is_contiguous(piece: nn.Parameter, *args: Any, **kwargs: Any) -> bool:
    """Behave as for any tensor, but raise if torch's own ``fully_shard`` is the caller."""
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    if caller.startswith("torch.distributed.fsdp"):
        raise RuntimeError(
            f"torch.distributed.fsdp takes {piece.fsdpc} for a whole parameter, which fsdpc "  # type: ignore[attr-defined]
            "shards already: leave its fully_shard (or replicate) out"
        )
    return torch.Tensor.is_contiguous(piece, *args, **kwargs)


def full_value(state: UnitState, index: int) -> torch.Tensor:
    """Return a parameter's full value in its original dtype; collective."""
    _device.join()
    state.torch_unit.follow(index)
    return _device.gathered(state, index, False)


def _none() -> None:
    """A dead reference."""


class Root:
    """The units of one model, found at its first forward."""

    def __init__(self, states: list[UnitState]) -> None:
        self.states = states
        self.torch_units: list[_core.TorchUnit] = [s.torch_unit for s in states]
        self.rank_dependent: list[_core.TorchUnit] = [
            s.torch_unit for s in states if s.unit.rank_dependent
        ]
        self.head: _core.TorchUnit = states[0].torch_unit
        self.measured: Measured = Measured()
        self.registered = -1  # registration count at the last search of modules
        self.spans: list[Any] = []  # open profiler ranges of backward
        self.finish_spans: Callable[[Root], None]  # set by _profile.py
        self.ending: Callable[[], Any] = _none  # the live callback that autograd will call

    def grads(self) -> list[tuple[UnitState, int, PieceGrad]]:
        """Return (unit, index, gradient) for each piece that has a gradient."""
        return [
            (s, i, p.grad)
            for s in self.states
            for i, p in enumerate(s.pieces)
            if isinstance(p.grad, PieceGrad)
        ]

    def at_end(self) -> None:
        """Make autograd call :meth:`finish` once, at the end of the current backward."""
        if self.ending() is not None:
            return
        if self.head.in_backward:
            self.reset()
        finish = partial(self.finish)
        _queue_callback(finish)
        self.ending = weakref.ref(finish, self._lost)

    def _lost(self, _: Any) -> None:
        """Reset after an exception in backward, when autograd has dropped :meth:`finish`."""
        if self.head.in_backward:
            self.reset()

    def finish(self) -> None:
        """Wait for reductions and assign gradients to the pieces."""
        self.ending = _none
        self.measured.outdate()
        for torch_unit in self.rank_dependent:
            torch_unit.catch_up()
        try:
            if self.spans:
                self.finish_spans(self)
            else:
                self.head.finish()
        except BaseException:
            for torch_unit in self.torch_units:
                torch_unit.hide(True)
            raise
        waiting = [s for s in self.states if s.torch_unit.settle()]
        for state in waiting:
            _run_hooks(state)

    def reset(self) -> None:
        """Reshard every unit and drop the gradients of an incomplete backward."""
        half = self.head.in_backward
        self.head.reset()
        for torch_unit in self.torch_units:
            torch_unit.hide(half)


def _run_hooks(state: UnitState) -> None:
    """Call the pieces' post-accumulate hooks once gradients are complete."""
    for piece in state.pieces:
        hooks = piece._post_accumulate_grad_hooks
        if hooks and piece.grad is not None:
            for hook in list(hooks.values()):
                hook(piece)


def states_of(module: nn.Module) -> list[UnitState]:
    """Return the distinct states of all units in a module."""
    states = (m._fsdpc_state for _, m in sharded_modules(module))
    return list({id(s): s for s in states}.values())


def refuse_missing(state: UnitState) -> NoReturn:
    """Raise an error that names the parameters without values; PyTorch checks only for memory."""
    names = [state.pieces[i].fsdpc.name for i in sorted(state.missing)]
    meta = all(state.pieces[i].is_meta for i in state.missing)
    raise RuntimeError(
        f"parameter '{state.names[min(state.missing)]}' of unit '{state.unit.name}' was on the "
        "meta device and has no values yet: load_state_dict(), or initialise it inside "
        "summon_full_params(). FSDP parameters should be materialized from meta device before "
        f"training, but the following {'were still on meta device' if meta else 'were not'}: "
        f"{names}"
    )


def make_root(module: nn.Module) -> Root:
    """Join all units of the outermost module around this one; collective."""
    module = outermost(module)
    name_units(module)
    ordered = states_of(module)
    for state in ordered:
        if not state.summoned:
            state.check_slots()
        state.missing.difference_update(state.written())
        if state.missing:
            refuse_missing(state)
        fill_blank(module, state)
    _device.join()
    check_drawn(ordered)
    encloses = enclosing(module)
    _core.make_root(list(encloses), list(encloses.values()))
    root = Root(ordered)
    for state in ordered:
        state.bind(root)
    for state in ordered:
        for action in state.when_rooted:
            action()
        state.when_rooted.clear()
    return root


def take_grads(states: list[UnitState]) -> None:
    """Report changed gradients of pieces to the engine, and clean up after abandoned backwards."""
    for state in states:
        if state.torch_unit.in_backward and torch._C._current_graph_task_id() == -1 and state.root:
            state.root.reset()
        state.torch_unit.take_grads()
