"""Units of torch parameters: sharded and unsharded parameters, and the root that joins units.

The engine owns the memory, and the tensors here are views of it that are created only once. Sharded
parameters and their gradients are created with the unit, and unsharded parameters when the root
exists. TorchUnit (csrc/bind/torch/unit.h) does each step's work; this file runs only at setup or
once per backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import swap_tensors

from fsdpc import _core
from fsdpc.sharding.rules import Found, Inside, enclosing, name_units, outermost, sharded_modules
from fsdpc.sharding.saved import SavedTensors, store_of
from fsdpc.torch import _device, _dtensor
from fsdpc.torch._buffers import fill_blank
from fsdpc.torch._drawn import check_drawn
from fsdpc.torch._dtensor import (
    BareShard,
    Home,
    ShardedGrad,
    ShardedTensor,
    attributes_of,
    spec_of,
)
from fsdpc.torch._fsdp2 import TorchState
from fsdpc.torch._grads import Measured
from fsdpc.torch._mesh import comm_of
from fsdpc.torch._param_layout import ParamLayout, is_cut, joined, ranks_of
from fsdpc.torch._readable import Readable
from fsdpc.torch._recipe import Recipe
from fsdpc.torch._saved import Saving, saving_of
from fsdpc.torch._subclasses import Refresh, take_codes_back
from fsdpc.torch._unsharded import bind
from fsdpc.torch.policies import MixedPrecisionPolicy

Slot = tuple[dict[str, Any], str, int]

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class ShardInfo:
    """Describes this rank's shard of a parameter: ``name``, full ``shape``, ``rows`` (begin, end).

    ``is_spread`` is whether other ranks have different rows, or none.
    """

    def __init__(self, state: UnitState, index: int, name: str, shape: torch.Size) -> None:
        self._state, self._index, self._name = state, index, name
        self.shape = shape
        layout = state.recipe.layouts[index]
        spread = state.comms[0].size > 1
        bounds = layout.bounds()
        self.is_spread = spread or any(
            pair != (0, extent) for pair, extent in zip(bounds, shape, strict=True)
        )
        _, _, first, numel, *_ = state.places[index]
        row = max(1, layout.stored[1:].numel())
        begin = bounds[layout.dim][0]
        self.rows = (begin + first // row, begin - (-(first + numel) // row))
        #: The rows, and which part of other dimensions.
        self.part: str = ", ".join(
            f"rows {b}:{e}" if dim == 0 else f"{b}:{e} of dimension {dim}"
            for dim, (b, e) in enumerate(
                [*bounds[: layout.dim], self.rows, *bounds[layout.dim + 1 :]]
            )
            if dim == layout.dim or (b, e) != (0, shape[dim])
        )

    @property
    def name(self) -> str:
        """The dotted name, complete once the outermost module has been called."""
        return f"{self._state.unit.name}.{self._name}"

    @property
    def unit(self) -> _core.Unit:
        """The unit that the parameter belongs to."""
        return self._state.unit

    @property
    def extent(self) -> str:
        """Identify the part and the shape; files of other ranks have another extent."""
        return f"{self.part} of {tuple(self.shape)}"

    def __repr__(self) -> str:
        return f"{self.part} of '{self.name}' {tuple(self.shape)}"

    def __deepcopy__(self, memo: Any) -> ShardInfo:
        return self


class UnitState(TorchState):
    """The data of a sharded module: its Unit and TorchUnit, its tensors and its options."""

    def __init__(
        self, recipe: Recipe, params: Found, dtypes: list[torch.dtype], readers: Inside
    ) -> None:
        self.recipe: Recipe = recipe
        self.store: SavedTensors | None = store_of(recipe.offload, recipe.where.comms[0].world_rank)
        self.modules: list[nn.Module] = recipe.modules
        self.policy: MixedPrecisionPolicy = recipe.policy
        self.comms: list[_core.Comm] = recipe.where.comms
        self.root: Root | None = None
        self.summoned: bool = False  # parameters are private full copies
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # those that step the unit
        self.names: list[str] = recipe.names
        self.layouts: list[ParamLayout] = recipe.layouts
        self.shapes: list[torch.Size] = [layout.shape for layout in recipe.layouts]
        self.missing: set[int] = {i for i, (_, p, _) in enumerate(params) if p.is_meta}
        # (name, dictionary, key, reference) of buffers that to_empty() created
        self.blank_buffers: list[tuple[str, dict[str, Any], str, Any]] = []
        self.attributes: list[dict[str, Any]] = [dict(p.__dict__) for _, p, _ in params]
        self.slots: list[Slot] = [
            (owner, key, i) for i, (_, _, at) in enumerate(params) for owner, key in at
        ]
        self.params: list[nn.Parameter] = []
        self._specs: dict[tuple[int, torch.dtype], DTensorSpec] = {}
        self._trainable: list[bool] = [p.requires_grad for _, p, _ in params]
        self.guards: list[tuple[dict[str, Any], partial[Any]]] = [
            (m.__dict__, partial(_refuse_call, self, path.rstrip(".")))
            for path, m in readers
            if type(m).forward is not nn.Module.forward
        ]
        self.unsharded: list[nn.Parameter] = []
        self.refreshes: list[Refresh] = []  # of unsharded parameters that are not only views
        self.known: list[tuple[dict[str, Any], str]] = []  # former places of parameters
        self.when_rooted: list[Callable[[], None]] = []
        self.cast_to: torch.dtype | None = (
            self.policy.param_dtype if self.policy.cast_forward_inputs else None
        )
        self.stand_on(recipe.make(dtypes), dtypes)
        for owner, key, i in self.slots:
            owner[key] = self.params[i]

    def stand_on(self, unit: _core.Unit, dtypes: list[torch.dtype]) -> None:
        """Make parameters views of this unit's masters, and create its TorchUnit."""
        self.unit: _core.Unit = unit
        self.dtypes: list[torch.dtype] = dtypes
        self.places: list[tuple[int, int, int, int, int, int]] = _core.unit_places(unit)
        self.masters: list[torch.Tensor] = [
            _device.to_torch(m) for m in _core.unit_memory(unit, "master")
        ]
        self.rows: list[torch.Tensor] = [
            self._rows(self.masters, i, self.places[i][5]).data for i in range(len(self.layouts))
        ]  # .data: each counts its own writes
        self.is_narrow: bool = any(
            m.is_floating_point() and m.dtype.itemsize < torch.float32.itemsize
            for m in self.masters
        )
        made = [self._make_param(i) for i in range(len(self.shapes))]
        if self.params:
            for old, new in zip(self.params, made, strict=True):
                old.grad = None
                swap_tensors(old, new)  # optimizers keep the object
        else:
            self.params = made
        self.trusted: list[int] = [self.version(i) for i in range(len(self.params))]
        self.torch_unit: _core.TorchUnit = _core.TorchUnit(
            unit,
            self.slots,
            self.params,
            self.adopt,
            self._make_grads,
            _device.streams(),
            _device.takes_back(),
            None if self.recipe.mesh is None else "_local_tensor",
        )
        self.torch_unit.guard(self.guards)
        self._make_grads()

    def _make_param(self, i: int) -> nn.Parameter:
        requires_grad = self.params[i].requires_grad if self.params else self._trainable[i]
        made = nn.Parameter(self.wrap(i, self.rows[i]), requires_grad)
        made.__dict__.update(self.attributes[i])
        if self.recipe.mesh is not None:
            made._fsdpc = (weakref.ref(self), i)  # type: ignore[attr-defined]
            made._fsdpc_is_param = True  # type: ignore[attr-defined]
            if i in self.missing:
                made.__class__ = BareShard
        made.fsdpc = ShardInfo(self, i, self.names[i], self.shapes[i])  # type: ignore[attr-defined]
        return made

    def wrap(self, i: int, rows: torch.Tensor, kind: type = ShardedTensor) -> Any:
        """Return rows as a DTensor, or unchanged if parameters are plain, as in DDP."""
        if self.recipe.mesh is None:
            return rows
        home: Home = (weakref.ref(self), i)
        return _dtensor.wrap(kind, rows, self._spec(i, rows.dtype), home)

    def _spec(self, i: int, dtype: torch.dtype) -> DTensorSpec:
        """Return the spec of a parameter's tensors, which compare fast because they share it."""
        if (i, dtype) not in self._specs:
            mesh, placements = self.layouts[i].placed(self.recipe.mesh, self.recipe.placements)
            self._specs[i, dtype] = spec_of(mesh, placements, self.shapes[i], dtype)
        return self._specs[i, dtype]

    def version(self, i: int) -> int:
        """Return the version counter of a parameter's rows."""
        param = self.params[i]
        return (param._local_tensor if isinstance(param, ShardedTensor) else param)._version

    def own_rows(self, i: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a full tensor of a parameter's shape, as a view or a copy.

        A DTensor that is placed like the unsharded parameter is accepted too.
        """
        _, _, first, numel, *_ = self.places[i]
        layout = self.layouts[i]
        stored = layout.store(full).reshape(-1)[first : first + numel]
        return layout.show(stored.view(self.unit.local(i).shape))

    def comms_of(self, i: int, cut_only: bool = False) -> list[_core.Comm]:
        """Return the communicators of a parameter's other mesh.

        With ``cut_only``, leave out dimensions whose ranks have the same part.
        """
        spec = self.layouts[i].spec
        if spec is None:
            return []
        dims = [k for k, p in enumerate(spec.placements) if is_cut(p) or not cut_only]
        return [comm_of(spec.mesh, k) for k in dims]

    def ranks(self) -> list[int]:
        """Return the ranks that have parts of the unit's parameters, over other meshes too."""
        if self.recipe.mesh is None:
            return []
        return max((ranks_of(self.mesh_of(i)) for i in range(len(self.layouts))), key=len)

    def mesh_of(self, i: int) -> Any:
        """Return the mesh of a parameter, with the dimensions of its other mesh."""
        spec = self.layouts[i].spec
        return self.recipe.mesh if spec is None else joined(self.recipe.mesh, spec.mesh)

    @property
    def is_running(self) -> bool:
        """Return whether the unit is inside its forward or backward."""
        return bool(self.torch_unit.depth or self.torch_unit.in_backward)

    def _rows(self, flats: list[torch.Tensor], i: int, offset: int) -> torch.Tensor:
        group, _, _, numel, *_ = self.places[i]
        if group >= len(flats):  # a frozen group has no gradients
            return self.masters[group].new_empty(0)
        rows = flats[group][offset : offset + numel].view(self.unit.local(i).shape)
        return self.layouts[i].show(rows)

    def _make_grads(self) -> None:
        """Allocate new gradient memory; earlier gradients that a caller has kept stay valid."""
        flats = _device.grad_memory(self.unit, self.masters)
        self.lent: list[_device.Lent] = [_device.Lent(flat) for flat in flats or ()]
        if flats is None:
            flats = [_device.to_torch(m) for m in _core.unit_memory(self.unit, "grad")]
        grads = [
            self.wrap(i, self._rows(flats, i, self.places[i][4]).data, ShardedGrad)
            for i in range(len(self.params))
        ]
        del flats
        for one in self.lent:
            one.users = one.count_users()
        self.torch_unit.place(grads, self.lent or None)

    def pool_grads(self) -> None:
        """Release gradient memory, because an optimizer steps the unit inside backward."""
        self.lent = []
        self.torch_unit.place([None] * len(self.params), None)

    def copy_of(self, i: int, value: torch.Tensor) -> nn.Parameter:
        """Return a private parameter with the attributes of parameter `i` over a full value."""
        kind, attributes = self.layouts[i].kind, attributes_of(self.params[i])
        requires_grad = self.params[i].requires_grad
        if kind is not None:
            return kind.whole(value, attributes).requires_grad_(requires_grad)
        made = nn.Parameter(value, requires_grad)
        made.__dict__.update(attributes)
        return made

    def write(self, i: int, full: torch.Tensor) -> None:
        """Write this rank's rows of a full value into the parameter."""
        self.torch_unit.follow(i)  # otherwise a replaced `.data` would be adopted later
        self.adopt_scales(i, full)
        stored = self.layouts[i].store(full.detach())
        self.unit.write(i, _device.to_engine(stored.contiguous()))
        self.trust(i)

    def adopt_scales(self, i: int, full: torch.Tensor) -> None:
        """Keep what every rank keeps of a full value: the scales of its codes."""
        kind = self.layouts[i].kind
        if kind is not None:
            with torch.no_grad():
                kind.adopt(self.params[i], full)

    def trust(self, i: int) -> None:
        """Record that a parameter's values came from a full value."""
        self.missing.discard(i)
        self.give_memory(i)
        self.trusted[i] = self.version(i)

    def give_memory(self, i: int) -> None:
        """Make a parameter report its real device."""
        if isinstance(self.params[i], BareShard):
            self.params[i].__class__ = ShardedTensor

    def written(self) -> list[int]:
        """Return the parameters written since their rows last came from a full value."""
        return [i for i in range(len(self.params)) if self.version(i) != self.trusted[i]]

    def check_slots(self) -> None:
        """Raise if a parameter has been replaced with another object, except by summoned copies."""
        for owner, key, i in () if self.summoned else self.slots:
            value = owner.get(key)
            own = (self.params[i], *self.unsharded[i : i + 1])
            if all(value is not p for p in own):
                raise RuntimeError(
                    f"parameter '{self.names[i]}' of unit '{self.unit.name}' was replaced by a "
                    f"{type(value).__name__} after fully_shard (by another fully_shard, or a "
                    "parametrization): do that before, or copy into it under no_grad()"
                )

    def show(self, unsharded: Sequence[nn.Parameter] | None) -> None:
        """Put full copies into modules and let them be called, or restore the params if given None.

        If given the params themselves, mark them as summoned and keep the modules from being
        called.
        """
        if unsharded is None and not self.summoned:
            return
        self.check_slots()
        for owner, key, i in self.slots:
            owner[key] = (unsharded or self.params)[i]
        self.summoned = unsharded is not None
        self.torch_unit.lift(self.summoned and unsharded is not self.params)

    def standing(self, copies: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the private copies that modules have now; raise if a replacement does not fit."""
        found = list(copies)
        take_codes_back(self.modules)
        for owner, key, i in self.slots:
            value, kind = owner.get(key), self.layouts[i].kind
            shape = self.shapes[i] if kind is None else kind.shape
            if value is not copies[i] or value.shape != shape:
                if not isinstance(value, torch.Tensor) or value.shape != shape:
                    raise RuntimeError(
                        f"parameter '{self.names[i]}' of unit '{self.unit.name}' was "
                        f"{tuple(shape)} at fully_shard() and now is "
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
            for (owner, key, i), p in zip(self.slots, copies, strict=True):
                if dtype not in (None, p.dtype) and self.dtypes[i] is not torch.uint8:
                    owner[key] = nn.Parameter(p.to(dtype), False)
            yield
        finally:
            for (owner, key, _), p in zip(self.slots, copies, strict=True):
                owner[key] = p

    def adopt(self, i: int) -> None:
        """Copy rows that replaced a parameter's into its own memory."""
        param, rows = self.params[i], self.rows[i]
        is_sharded = isinstance(param, ShardedTensor)
        given = param._local_tensor if is_sharded else param.data
        if given.shape != rows.shape:
            raise ValueError(
                f"the rows of a parameter were replaced by {tuple(given.shape)}, and this rank has "
                f"{param.fsdpc}, {tuple(rows.shape)}: give it these rows, "  # type: ignore[attr-defined]
                "or write full values inside summon_full_params() or by load_state_dict()"
            )
        with torch.no_grad():
            rows.copy_(given)
            if is_sharded:
                param._local_tensor = rows
            else:
                param.data = rows
        self.give_memory(i)


@contextmanager
def on_copies(
    states: Sequence[UnitState], copies: Sequence[Sequence[nn.Parameter]]
) -> Iterator[Callable[[], list[list[nn.Parameter]]]]:
    """Put private copies of the units' parameters into modules; restore the params on exit.

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
        self.readable: Readable = Readable()
        self.saving: Saving | None = None  # of units whose activations leave

    def grads(self) -> list[tuple[UnitState, int, ShardedTensor]]:
        """Return (unit, index, gradient) for each parameter that has a gradient."""
        return [
            (s, i, p.grad)
            for s in self.states
            for i, p in enumerate(s.params)
            if isinstance(p.grad, ShardedGrad)
        ]

    def at_end(self) -> None:
        """Make autograd call :meth:`finish` once, at the end of the current backward."""
        self.readable.hide()
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
        """Wait for reductions and assign gradients to the params."""
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

    def reduce(self) -> None:
        """Reduce what earlier backwards have left in reduce buffers; collective.

        A pipeline schedule that splits backward leaves gradients at unsharded parameters.
        """
        for torch_unit in self.torch_units:
            torch_unit.catch_up()
        self.ending = lambda: True  # no backward runs, so autograd would call nothing
        try:
            for state in self.states:
                for param in state.unsharded:
                    if param.grad is not None:
                        _call_hooks(param)
        except BaseException:
            self.ending = _none
            self.reset()
            raise
        self.finish()

    def reset(self) -> None:
        """Reshard every unit and drop the gradients of an incomplete backward."""
        half = self.head.in_backward
        self.readable.hide()
        self.head.reset()
        for state in self.states:
            for param in state.unsharded:
                param.grad = None  # of a pipeline schedule that split backward
        for torch_unit in self.torch_units:
            torch_unit.hide(half)


def _run_hooks(state: UnitState) -> None:
    """Call the params' post-accumulate hooks once gradients are complete."""
    for param in state.params:
        if param.grad is not None:
            _call_hooks(param)


def _call_hooks(param: nn.Parameter) -> None:
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        hook(param)


def states_of(module: nn.Module) -> list[UnitState]:
    """Return the distinct states of all units in a module."""
    states = (m._fsdpc_state for _, m in sharded_modules(module))
    return list({id(s): s for s in states}.values())


def check_same_ranks(states: Sequence[UnitState], what: str) -> None:
    """Raise if some ranks share only some of the units, which are on different meshes."""
    first = states[0]
    for state in states:
        if state.comms != first.comms and state.ranks() != first.ranks():
            raise NotImplementedError(
                f"{what} of units '{first.unit.name}' on {first.recipe.mesh} and "
                f"'{state.unit.name}' on {state.recipe.mesh}, which have different ranks"
            )


def refuse_missing(state: UnitState) -> NoReturn:
    """Raise an error that names the parameters without values; PyTorch checks only for memory."""
    names = [state.params[i].fsdpc.name for i in sorted(state.missing)]
    meta = all(state.params[i].is_meta for i in state.missing)
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
        state.check_slots()
        state.missing.difference_update(state.written())
        if state.missing:
            refuse_missing(state)
        fill_blank(module, state)
    _device.join()
    check_drawn(ordered)
    saving = saving_of(ordered)
    encloses = enclosing(module)
    _core.make_root(list(encloses), list(encloses.values()))
    root = Root(ordered)
    root.saving = saving
    for state in ordered:
        state.root = root
        bind(state)
    for state in ordered:
        for action in state.when_rooted:
            action()
        state.when_rooted.clear()
    return root


def take_grads(states: list[UnitState]) -> None:
    """Report changed gradients of params to the engine, and clean up after abandoned backwards."""
    for state in states:
        if state.torch_unit.in_backward and torch._C._current_graph_task_id() == -1 and state.root:
            state.root.reset()
        state.torch_unit.take_grads()
