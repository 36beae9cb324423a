"""Parameters, gradients and optimizer states of sharded modules: DTensors over the engine's shards.

A :class:`ShardedTensor` is a DTensor whose local tensor is this rank's rows of a parameter, or of a
tensor like it. A :class:`DerivedTensor` is any other result. ``_operations.py`` runs operations on
both.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils

from fsdpc import distributed
from fsdpc.torch import _device

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

#: Weak, because a parameter references its gradient in C++, invisible to the cycle collector.
Home = tuple["weakref.ref[UnitState]", int]

#: The module of ``torch.save``, whose frames contain the file.
_SAVER = "torch.serialization"
_SPLIT_BACKWARD = "torch.distributed.pipelining._backward"

_descriptor: Any = DTensor.__dict__["_local_tensor"]
rows_of: Callable[[DTensor], torch.Tensor] = _descriptor.__get__


def _caller() -> str:
    """Return the module that calls the method that calls this."""
    return str(sys._getframe(2).f_globals.get("__name__"))


class _Running(threading.local):
    """The sharded modules that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.modules: list[Any] = []


RUNNING = _Running()


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
        """Apply the factors."""
        self.any = False
        for state in self.states:
            state.torch_unit.apply_scale()
        self.states.clear()


PENDING = _Pending()


class Operations:
    """Runs the operations on sharded tensors."""

    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # set by _operations.py


LOST_ROWS = (
    "which torch's DTensor has copied, and the write would be lost: write to to_local(), or inside "
    "summon_full_params()"
)
LOST_CODES = (
    "which is a decoded copy of a coded state, and the write would be lost: load states with "
    "load_state_dict() or set_optimizer_state_dict()"
)


class ShardedTensor(DTensor):
    """This rank's rows of a parameter, a gradient, an optimizer state, or a copy of one."""

    _fsdpc: Home
    _fsdpc_is_param = False  # a parameter, or an alias of its memory
    _fsdpc_lost = ""  # why writes would be lost: one of LOST_ROWS and LOST_CODES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; DTensor's method only lets the compiler skip it, at the cost of 5 us."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if PENDING.any:
            PENDING.settle()
        return Operations.run(func, args, kwargs or {})

    def home(self) -> tuple[UnitState, int] | None:
        """Return the unit and the index of the parameter, or None if the model was deleted."""
        state = self._fsdpc[0]()
        return None if state is None else (state, self._fsdpc[1])

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor, which autograd tracks like DTensor's; collective."""
        home = self.home()
        recorded = torch.is_grad_enabled() and self.requires_grad
        if home is None:
            return super().full_tensor(grad_placements=grad_placements)
        if not recorded:
            return gathered(self, *home)
        return _Averaged.apply(_Whole.apply(self, *home), home[0])

    def _get_data(self) -> ShardedTensor:
        return self.detach()

    def _set_data(self, value: torch.Tensor) -> None:
        """Copy values into the rows: ``.data`` of a DTensor has no memory that can be replaced."""
        home = self.home()
        if home is None or self is not home[0].params[home[1]]:
            raise NotImplementedError(f"assigning .data of a copy of {name_of(self)}: use copy_()")
        if value.shape != self.shape:
            raise ValueError(
                f"the .data of a parameter was replaced by {tuple(value.shape)}, and "
                f"{name_of(self)} is {tuple(self.shape)}: give it a DTensor or a full tensor of "
                "its shape, or write to to_local()"
            )
        state, index = home
        value = value.detach()
        with torch.no_grad():
            self.copy_(
                value
                if isinstance(value, DTensor)
                else state.wrap(index, state.own_rows(index, value))
            )
        state.give_memory(index)

    data = property(_get_data, _set_data)  # type: ignore[assignment]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """Behave as for any tensor, but raise if torch's own ``fully_shard`` is the caller."""
        if _caller().startswith("torch.distributed.fsdp"):
            raise RuntimeError(
                f"torch.distributed.fsdp would shard {name_of(self)}, which fsdpc shards already: "
                "leave its fully_shard (or replicate) out"
            )
        return super().is_contiguous(*args, **kwargs)

    def untyped_storage(self) -> Any:
        """Raise if the caller saves memory, because the local tensor's has only some rows."""
        caller = _caller()
        if caller.startswith(("safetensors", "accelerate")):
            raise RuntimeError(
                f"{name_of(self)} is a DTensor without a storage, and {caller} would take its rows "
                "for the whole: save with fsdpc.checkpoint or torch.distributed.checkpoint, or "
                "what get_model_state_dict() and get_optimizer_state_dict() of fsdpc.torch return"
            )
        return super().untyped_storage()

    storage = untyped_storage

    def data_ptr(self) -> int:
        """Return 0, as any DTensor does; accelerate identifies parameters by their rows."""
        return self._local_tensor.data_ptr() if _caller().startswith("accelerate") else 0

    def __tensor_flatten__(self) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith("torch.export"):
                raise RuntimeError(
                    f"torch.export of a module with {name_of(self)}, which gathers its parameters: "
                    "export a copy made before fully_shard()"
                )
            frame = frame.f_back
        return super().__tensor_flatten__()

    def register_hook(self, hook: Any) -> Any:
        """Raise for parameters, because the reductions that create gradients run no hooks."""
        if self.is_leaf and self.requires_grad:
            raise NotImplementedError(
                f"register_hook on {name_of(self)}, where it would never run: "
                "register_post_accumulate_grad_hook runs when the rows have their gradient"
            )
        return super().register_hook(hook)

    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return a view; raise in pipeline schedules that compute weight gradients separately.

        These schedules find a weight in autograd's graph through a view. Unsharded parameters are
        in the graph, and sharded ones never, so these would get no gradients.
        """
        if _caller() == _SPLIT_BACKWARD:
            raise NotImplementedError(
                f"a pipeline schedule that splits backward, with {name_of(self)}: "
                "ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble and ScheduleDualPipeV find "
                "weights in autograd's graph, which a sharded parameter is not in, and would leave "
                "it without a gradient. Give fully_shard(reshard_after_forward=False) for every "
                "unit, or use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
            )
        return super().view_as(other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a DTensor, with its rows in an attribute; see ``_shards.py``."""
        rows = self._local_tensor.detach()
        plain = DTensor(_empty(rows.dtype, rows.device), self._spec, requires_grad=False)
        plain._local_tensor = rows.clone()  # torch.save would write all of the memory around them
        home = self.home()
        if home is not None and type(self) is not DerivedTensor:
            info = home[0].params[home[1]].fsdpc  # type: ignore[attr-defined]
            if info.is_spread:
                check_file(str(info))
                plain.fsdpc_rows = info.extent  # type: ignore[attr-defined]
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        memo[id(self)] = copied
        return copied


def _no_unit() -> None:
    """A reference to a unit, for tensors that have none."""


def _unflatten(kind: type, inner: Any, context: Any, size: Any, stride: Any) -> Any:
    """Return a tensor of the class that was flattened, which the compiler compares.

    It has no unit, so torch's DTensor runs what the compiler traces.
    """
    local = inner["_local_tensor"]
    plain = DTensor.__tensor_unflatten__(inner, context, size, stride)
    made = kind(local.new_empty(0), plain._spec, requires_grad=plain.requires_grad)  # as in wrap()
    made._local_tensor = local
    made._fsdpc = _no_unit, -1
    return made


class _Averaged(torch.autograd.Function):
    """The identity function, whose gradient is the average over the ranks that share gradients.

    Ranks' losses may differ, as those of their batches do; torch's DTensor would take the gradient
    of each rank's own loss for its rows.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, state: UnitState) -> torch.Tensor:
        ctx.state = state
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True)
        total = total.contiguous()
        for comm in ctx.state.comms[: 1 if ctx.state.unit.apart else None]:
            if comm.size > 1:
                comm.all_reduce(_device.to_engine(total), "sum")
                total /= comm.size
        return total.to(grads[0].dtype), None


class _Whole(torch.autograd.Function):
    """The gather of a tensor, whose gradient is this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor, state: UnitState, index: int) -> torch.Tensor:
        ctx.state, ctx.index = state, index
        return gathered(tensor, state, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        state, index = ctx.state, ctx.index
        return state.wrap(index, state.own_rows(index, grads[0]).clone()), None, None


class DerivedTensor(ShardedTensor):
    """A result of another shape or placement, which remembers the parameter for error messages."""

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor; collective."""
        value = DTensor.full_tensor(self, grad_placements=grad_placements)
        home = self.home()
        recorded = torch.is_grad_enabled() and self.requires_grad
        return _Averaged.apply(value, home[0]) if recorded and home is not None else value


class BareShard(ShardedTensor):
    """A parameter of a meta-device module, until ``to_empty()`` is called or it gets values.

    The engine has already allocated its memory; the parameter only claims to be on the meta device.
    """

    device = torch.device("meta")
    is_meta = True

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DTensor(device='meta', size={tuple(self.shape)}, placements={self.placements})"


class ShardedGrad(ShardedTensor):
    """A gradient whose pending clipping factor is applied before its rows are read."""

    _fsdpc_of: ShardedGrad | None = None  # the gradient that this is an alias of
    _fsdpc_norm: tuple[Any, torch.Tensor] | None = None  # (order, age, version) and the norm

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        if PENDING.any:
            PENDING.settle()
        return rows_of(self)

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        _descriptor.__set__(self, value)


_KINDS: tuple[Any, ...] = (ShardedTensor, BareShard, ShardedGrad, DerivedTensor)
for _kind in _KINDS:
    _kind.__tensor_unflatten__ = staticmethod(partial(_unflatten, _kind))
# Optimizers and clipping check exact types to decide whether to use list operations.
for _types in (_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types += _KINDS

_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def gathered(tensor: ShardedTensor, state: UnitState, index: int) -> torch.Tensor:
    """Gather a parameter, or a tensor with rows like it; collective."""
    if tensor is state.params[index]:
        state.torch_unit.follow(index)
    rows = state.layouts[index].rows_of(tensor._local_tensor.detach()).contiguous()
    bits = rows.view(_BITS[rows.element_size()])
    return _device.gathered(state, index, bits).view(rows.dtype)


def spec_of(mesh: Any, placements: Sequence[Any], shape: torch.Size, dtype: Any) -> DTensorSpec:
    """Return the spec of a contiguous tensor of this global shape."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    meta = TensorMeta(shape, tuple(reversed(strides))[: len(shape)] if shape else (), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def wrap(kind: type, local: torch.Tensor, spec: DTensorSpec, home: Home) -> Any:
    """Return a local tensor as a DTensor of this class, sharing its memory.

    A DTensor takes its storage offset from the local tensor, and torch takes one whose offset is
    not 0 for a tensor with memory when it saves it. It is therefore created over an empty tensor.
    """
    made = kind(_empty(local.dtype, local.device), spec, requires_grad=False)
    made._local_tensor = local
    made._fsdpc = home
    return made


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that are not fsdpc's own."""
    return {
        key: value
        for key, value in tensor.__dict__.items()
        if key not in ("fsdpc", "_local_tensor", "_spec") and not key.startswith("_fsdpc")
    }


def name_of(tensor: ShardedTensor) -> str:
    """Return the name of the parameter that a tensor belongs to, and this rank's rows."""
    home = tensor.home()
    return "a parameter" if home is None else str(home[0].params[home[1]].fsdpc)  # type: ignore[attr-defined]


def is_replicated(spec: DTensorSpec) -> bool:
    """Return whether every rank of the mesh has the whole tensor."""
    return all(p.is_replicate() for p in spec.placements)


def agree(a: DTensorSpec, b: DTensorSpec) -> bool:
    """Return whether tensors of these specs have the same rows on every rank."""
    return a.placements == b.placements and a.shape == b.shape and a.mesh == b.mesh


_scalars: dict[Any, DTensorSpec] = {}  # by mesh and dtype; specs are immutable


def replicated(value: torch.Tensor, like: ShardedTensor, mesh: Any = None) -> DTensor:
    """Return a value that is equal on all ranks of a mesh, by default a tensor's, as a DTensor."""
    mesh = mesh or like._spec.mesh
    key = mesh, value.dtype
    spec = _scalars.get(key) if not value.dim() else None
    if spec is None:
        spec = spec_of(mesh, [Replicate()] * mesh.ndim, value.shape, value.dtype)
        if not value.dim():
            _scalars[key] = spec
    return wrap(DerivedTensor, value, spec, like._fsdpc)


def refuse_mixed(name: str, ours: ShardedTensor, other: torch.Tensor) -> NoReturn:
    """Raise an error for an operation that mixes a sharded and a plain tensor."""
    what = name_of(ours)
    if RUNNING.modules:
        home = ours.home()
        unit = home[0].unit.name if home is not None else "?"
        raise RuntimeError(
            f"{name} of {what} in the forward of {type(RUNNING.modules[-1]).__name__} got mixed "
            f"torch.Tensor and DTensor: unit '{unit}' does not run there, and this rank has {what} "
            f"only. Do not shard '{unit}' by itself, so that the unit around it holds the "
            "parameter. Or read the parameter in a method of its own module, and call "
            "register_fsdp_forward_method(module, name)"
        )
    raise RuntimeError(
        f"{name}: got mixed torch.Tensor and DTensor, a plain tensor {tuple(other.shape)} and "
        f"{what}. Outside of the forward of its unit a parameter is a DTensor, of which "
        "this rank has some rows: call the sharded module, let register_fsdp_forward_method"
        "(module, name) name the method that reads it, read it between unshard() and reshard(), or "
        "use its full_tensor() or to_local()"
    )


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
