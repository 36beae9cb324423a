"""The steps around the forward of a sharded module.

    enter -> cast and mark the inputs -> forward -> mark and cast the outputs -> leave

A mark on an output's autograd node tells the schedule when the unit's backward begins. An autograd
Function over the inputs that need gradients tells it when the backward ends. ``_core.rebuild`` and
_structures.py find the tensors.

A forward inside backward is a recomputation (activation checkpointing). A recomputation may stop
early, through an exception that torch raises.

A reentrant checkpoint runs its forward without gradients, so its outputs carry no mark with the
version of the weights. If an outermost forward runs inside such a checkpoint, the checkpoint's
context records that version instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.autograd import profiler
from torch.utils.checkpoint import CheckpointFunction

from fsdpc import _core
from fsdpc.torch import _profile
from fsdpc.torch._dtensor import RUNNING
from fsdpc.torch._late import Registered, check_late
from fsdpc.torch._structures import returned
from fsdpc.torch._unit import Root, UnitState, make_root, states_of

_FORWARD = CheckpointFunction.forward.__code__
_BACKWARD = CheckpointFunction.backward.__code__

_task_id = torch._C._current_graph_task_id
_is_grad_enabled = torch.is_grad_enabled
#: The sequence number of autograd's next node; without it, objects are not searched.
_next_node: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: sys.maxsize)
_transform = torch._C._functorch.peek_interpreter_stack

#: Public names of functorch transforms, with the functions derived from them.
_TRANSFORMS = {
    "Grad": "torch.func.grad (or vjp, jacrev, hessian)",
    "Jvp": "torch.func.jvp (or jacfwd)",
    "Vmap": "torch.func.vmap",
}
#: torch features that replace a module's parameters during a forward, by Python module.
_REPLACING = {
    "torch._functorch.functional_call": "torch.func.functional_call",
    "torch.nn.utils.stateless": "torch.func.functional_call",
    "torch.export._trace": "torch.export",
}


class _EndBackward(torch.autograd.Function):
    """The identity function, whose backward runs once the gradients of all inputs exist."""

    @staticmethod
    def forward(
        ctx: Any, torch_unit: _core.TorchUnit, state: UnitState, *inputs: torch.Tensor
    ) -> Any:
        ctx.torch_unit, ctx.state = torch_unit, state
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if _is_grad_enabled():  # create_graph
            _check_second(ctx.state, grads)
        ctx.torch_unit.end_backward()
        return (None, None, *grads)


def _check_second(state: UnitState, grads: Any) -> None:
    """Make a second backward through a resharded unit raise an error that names the unit."""
    seen = [p._version for p in state.unsharded]

    def check(_: Any) -> None:
        if [p._version for p in state.unsharded] != seen:
            raise RuntimeError(
                f"a second backward (create_graph) through unit '{state.unit.name}': fsdpc freed "
                "its unsharded parameters after the first one, and to autograd they were modified "
                "by an inplace operation. Keep them with "
                "fully_shard(..., reshard_after_forward=False) and "
                "set_reshard_after_backward(False)"
            )

    for grad in grads:
        if grad is not None and grad.requires_grad:
            grad.register_hook(check)


def run(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run a forward (or another method) of a sharded module."""
    state: UnitState = module.__dict__["_fsdpc_state"]
    grad = _is_grad_enabled()
    if grad and _transform() is not None:
        _refuse_transform(module)
    if state.summoned:
        return _run_on_copies(module, state, call, args, kwargs)
    torch_unit, root = state.torch_unit, state.root or make_root(module)
    root.readable.hide()
    in_task = _task_id() != -1
    if not in_task and torch_unit.in_backward:
        root.reset()  # an exception ended the last backward
    outermost = torch_unit.depth == 0
    since = _next_node() if grad else 0
    if root.registered != Registered.count and outermost and not in_task:
        root.registered = check_late(root.states)
    if in_task and grad and not torch_unit.in_backward:
        _recall(root, torch_unit)
    span: Any = None
    marks: Any = torch_unit
    try:
        if profiler._is_profiler_enabled:
            span, first = _profile.enter(state, grad, in_task)
            marks = _profile.Marks(state)
        else:
            first = torch_unit.enter(grad, in_task)
    except BaseException as error:
        if not in_task:
            root.reset()
        _explain(module, state, error)
        raise
    if outermost and not grad and not in_task:
        _remember(root, torch_unit)
    RUNNING.modules.append(module)
    saving = None if in_task else root.saving
    try:
        if saving is not None:
            if outermost and grad:
                saving.enter(state.unit.name)
            saving.begin_unit(state)
        if state.cast_to is not None:
            args = _cast(args, state.cast_to)
            kwargs = _cast(kwargs, state.cast_to)
        if grad and first:
            args, kwargs = _mark_inputs(marks, state, args, kwargs)
        result = call(*args, **kwargs)
        if state.policy.output_dtype is not None:
            result = _cast(result, state.policy.output_dtype)
        if grad:
            _mark_outputs(marks, result, since)
        if saving is not None:
            saving.end_unit(state)
    except BaseException:
        if torch_unit.depth > 1 or (in_task and torch_unit.in_backward):
            torch_unit.leave()  # an enclosing forward may catch this and continue
        else:
            root.reset()
        if span is not None:
            _profile.leave(span)
        raise
    finally:
        RUNNING.modules.pop()
        if saving is not None and outermost and saving.current is not None:
            saving.leave()
    torch_unit.leave()
    if outermost:
        root.readable.hide()
    elif len(state.modules) > 1 and not in_task and state.unit.state == "unsharded":
        root.readable.show(state)
    if span is not None:
        _profile.leave(span)
    return result


def _refuse_transform(module: Any) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__} is sharded and was called with gradients under "
        f"{_TRANSFORMS[_transform().key().name]}, whose backward no unit sees: transform a copy "  # type: ignore[union-attr]
        "made before fully_shard(), or call it under torch.no_grad(), as vmap and jvp can"
    )


def _explain(module: Any, state: UnitState, error: BaseException) -> None:
    """Raise an error that names the torch feature that has replaced parameters, if any."""
    own = {id(p) for p in (*state.params, *state.unsharded)}
    if all(id(owner.get(key)) in own for owner, key, _ in state.slots):
        return
    frame, name = sys._getframe(2), ""
    while frame is not None:
        name = _REPLACING.get(frame.f_globals.get("__name__", ""), name)
        frame = frame.f_back  # type: ignore[assignment]
    if name:
        raise RuntimeError(
            f"{name} of {type(module).__name__}, which is sharded: its units gather their "
            "parameters and cannot compute with others. Do it inside summon_full_params(), under "
            "torch.no_grad(), or, for gradients, with a copy made before fully_shard()"
        ) from error


def _run_on_copies(
    module: Any, state: UnitState, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Run a forward on the private copies of ``summon_full_params``, without communication."""
    name = type(module).__name__
    if any(owner[key] is state.params[i] for owner, key, i in state.slots):
        raise RuntimeError(
            f"{name} was called inside summon_full_params(rank0_only=True) on a rank that keeps "
            "its rows there: call it only on rank 0, or summon on all ranks"
        )
    if _is_grad_enabled():
        raise RuntimeError(
            f"{name} was called while its parameters stand on private copies, inside "
            "summon_full_params() or apply(), where gradients would reach only the copies: call "
            "it under torch.no_grad(), or after"
        )
    if state.root is None and not all(s.summoned for s in states_of(module)):
        make_root(module)  # units inside run as usual
    with state.computing():
        if state.cast_to is not None:
            args, kwargs = _cast(args, state.cast_to), _cast(kwargs, state.cast_to)
        RUNNING.modules.append(module)
        try:
            result = call(*args, **kwargs)
        finally:
            RUNNING.modules.pop()
    output = state.policy.output_dtype
    return result if output is None else _cast(result, output)


# ---- reentrant checkpoints ----


def _contexts(of: Any) -> Iterator[Any]:
    """Yield the contexts of all running checkpoints, in forward or backward, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is of:
            yield frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]


def _remember(root: Root, torch_unit: _core.TorchUnit) -> None:
    """Record the current version of the weights in each checkpoint around this forward."""
    for ctx in _contexts(_FORWARD):
        ctx.__dict__.setdefault("_fsdpc_seen", {})[id(root)] = torch_unit.generation


def _recall(root: Root, torch_unit: _core.TorchUnit) -> None:
    """Begin the backward with the version of the weights that the recomputed forward used."""
    for ctx in _contexts(_BACKWARD):
        seen = ctx.__dict__.get("_fsdpc_seen", {}).get(id(root))
        if seen is not None:
            torch_unit.generation = seen
            return


# ---- casts and marks ----


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def change(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t

    return _core.rebuild(value, torch.Tensor, change)


def _mark_inputs(torch_unit: Any, state: UnitState, args: Any, kwargs: Any) -> tuple[Any, Any]:
    found: list[torch.Tensor] = []
    _core.rebuild(args, torch.Tensor, found.append)
    n_positional = len(found)
    _core.rebuild(kwargs, torch.Tensor, found.append)
    inputs = [t for t in found if t.requires_grad]
    if not inputs:
        return args, kwargs
    marked = iter(_EndBackward.apply(torch_unit, state, *inputs))

    def change(t: torch.Tensor) -> torch.Tensor:
        return next(marked) if t.requires_grad else t

    args = _core.rebuild(args, torch.Tensor, change)
    if len(found) > n_positional:
        kwargs = _core.rebuild(kwargs, torch.Tensor, change)
    return args, kwargs


def _mark_outputs(torch_unit: Any, result: Any, since: int) -> None:
    mark = None
    for t in (result,) if isinstance(result, torch.Tensor) else returned(result, since):
        if not t.requires_grad:
            continue
        if mark is None:
            mark = torch_unit.mark()
        if t.grad_fn is not None:
            t.grad_fn.register_prehook(mark)
        base = t._base
        if base is not None and base.grad_fn is not None:
            base.grad_fn.register_prehook(mark)
