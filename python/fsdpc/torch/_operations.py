"""Operations on sharded tensors: what torch's DTensor does, made exact, fast and safe.

Torch's DTensor runs most operations. This file changes the following:

- Elementwise operations, including lists of them (foreach and fused optimizers), run directly on
  local tensors if their placements agree.
- Results are never partial: their reduction follows at once. Torch reads the local part of a
  partial number (``item()``), and reduces some partial results of reductions wrongly.
- Operations on tensors that are not cut evenly run on whole tensors, unless they are elementwise.
  Torch cannot flatten such tensors, and averages their losses wrongly.
- Random numbers are drawn for the whole tensor, of which each rank keeps its rows, so they do not
  depend on the number of ranks. Torch draws equal numbers for different rows on CPUs.
- Writes that would be lost are refused: into selected rows, which torch copies first, and into
  parameters in a running forward, which may have gathered them already.
- Errors name the parameter.

Code below a dispatch does not count writes to local tensors, so they are counted here. The engine
reads these version counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdpc.torch._dtensor import (
    LOST_ROWS,
    RUNNING,
    DerivedTensor,
    Operations,
    ShardedGrad,
    ShardedTensor,
    agree,
    gathered,
    is_replicated,
    name_of,
    refuse_mixed,
    replicated,
    rows_of,
    wrap,
)
from fsdpc.torch._implicit_replication import cut
from fsdpc.torch._param_layout import is_cut, local_of, spec_as

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_aten = torch.ops.aten
_OURS = frozenset({ShardedTensor, ShardedGrad})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with a sharded tensor among its arguments."""
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = _handler_of(func)
    return handler(func, args, kwargs)


Operations.run = run


def handle(func: Any, handler: Handler) -> None:
    """Let a function implement an operation on sharded tensors."""
    _HANDLERS[func] = handler


def _word(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _ours(values: Iterable[Any]) -> ShardedTensor:
    """Return the first sharded tensor of an operation's arguments."""
    return next(t for t in _tensors(values) if isinstance(t, ShardedTensor))


def _is_mixed(value: torch.Tensor) -> bool:
    """Return whether a plain tensor must not meet a DTensor: other ranks' may differ."""
    mixed = bool(value.dim()) or (value.requires_grad and torch.is_grad_enabled())
    return mixed and not DTensor._op_dispatcher._allow_implicit_replication


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


# ---- elementwise operations ----


class _NotLocal(Exception):
    """The operands' placements differ, so torch must redistribute them."""


class _Unwrapper:
    """Replaces DTensors by their local tensors, and remembers a DTensor for each position."""

    def __init__(self) -> None:
        self.like: dict[int, DTensor] = {}
        self.plain: set[int] = set()  # positions with a plain tensor that counts as replicated

    def one(self, value: Any, at: int = 0) -> Any:
        if type(value) is list:
            return self.many(value)
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, DTensor):
            if _is_mixed(value):
                raise _NotLocal
            if value.dim():
                self.plain.add(at)
            return value
        spec = value._spec
        if not value.dim() and is_replicated(spec):
            return value._local_tensor
        like = self.like.get(at)
        if like is None:
            if any(p.is_partial() for p in spec.placements):
                raise _NotLocal
            self.like[at] = value
        elif like._spec is not spec and not agree(like._spec, spec):
            raise _NotLocal
        return value._local_tensor

    def many(self, values: list[Any]) -> list[Any]:
        like, local = self.like, []
        for at, value in enumerate(values):  # often hundreds, so cheap checks come first
            if type(value) in _OURS and value._spec.shape:
                of = like.setdefault(at, value)
                if of is value or of._spec is value._spec:
                    local.append(rows_of(value))
                    continue
            elif type(value) is torch.Tensor and not value.dim():
                local.append(value)
                continue
            local.append(self.one(value, at))
        return local


def _kind_of(tensor: DTensor) -> type:
    return DerivedTensor if isinstance(tensor, DerivedTensor) else ShardedTensor


def _wrapped(result: Any, like: dict[int, DTensor], at: int = 0) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_wrapped(r, like, k) for k, r in enumerate(result))
    of = like.get(at)  # None: only plain tensors are there
    if of is None or not isinstance(result, torch.Tensor):
        return result
    spec = spec_as(of._spec, result.dtype)
    if isinstance(of, ShardedTensor):
        return wrap(_kind_of(of), result, spec, of._fsdpc)
    return DTensor(result, spec, requires_grad=False)


def _as_part(of: DTensor, whole: torch.Tensor) -> Any:
    return _wrapped(part_of(of, whole), {0: of})


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that reads and writes only elements at the same position."""
    unwrap = _Unwrapper()
    try:
        local = [unwrap.one(a) for a in args]
        named = {k: unwrap.one(v) for k, v in kwargs.items()}
    except _NotLocal:
        return by_torch(func, args, kwargs)
    if unwrap.plain & unwrap.like.keys():
        try:
            made = cut((args, kwargs), unwrap.like, _as_part, _written(func, args))
        except RuntimeError:
            return by_torch(func, args, kwargs)
        return _elementwise(func, *made)
    if not unwrap.like:
        return by_torch(func, args, kwargs)
    if not func._schema.is_mutable:
        return _wrapped(func(*local, **named), unwrap.like)
    written = _written(func, args)
    _check_writes(func, written)
    result = func(*local, **named)
    _count(written)
    return None if result is None else args[0]


_positions: dict[Any, list[int]] = {}


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the positional arguments that an operation writes."""
    at = _positions.get(func)
    if at is None:
        at = _positions[func] = [
            k
            for k, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
    return [args[k] for k in at if k < len(args)]


def _count(written: Iterable[Any]) -> None:
    """Count writes in the local tensors' versions."""
    for each in written:
        each = each if isinstance(each, list) else [each]
        if each:
            increment_version([rows_of(t) for t in each if isinstance(t, DTensor)])


def _check_writes(func: Any, written: Iterable[Any]) -> None:
    """Raise if a write would be lost."""
    for each in _tensors(written):
        if not isinstance(each, ShardedTensor):
            continue
        if each._fsdpc_lost:
            what = "some rows" if each._fsdpc_lost == LOST_ROWS else "a state"
            raise NotImplementedError(
                f"{_word(func)} writes into {what} of {name_of(each)}, {each._fsdpc_lost}"
            )
        if RUNNING.modules and each._fsdpc_is_param:
            raise RuntimeError(
                f"{_word(func)} of {name_of(each)} in the forward of "
                f"{type(RUNNING.modules[-1]).__name__}, which may have gathered the parameter "
                "already: write before or after the forward"
            )


# ---- operations that keep the shape, and random numbers ----


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    made = wrap(type(tensor), rows_of(tensor), tensor._spec, tensor._fsdpc)
    if isinstance(tensor, ShardedGrad):
        made._fsdpc_of = tensor if tensor._fsdpc_of is None else tensor._fsdpc_of
    return _marked(made, tensor)


def _marked(alias: Any, of: ShardedTensor) -> Any:
    """Return an alias that is known as a parameter's, or as one in which writes are lost."""
    if of._fsdpc_is_param:
        alias._fsdpc_is_param = True
    if of._fsdpc_lost:
        alias._fsdpc_lost = of._fsdpc_lost
    return alias


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement clones, conversions and constructors, which keep the shape and the placements."""
    tensor = args[0]
    local = func(tensor._local_tensor, *args[1:], **kwargs)
    if local.device != tensor._local_tensor.device:
        return by_torch(func, args, kwargs)
    return wrap(_kind_of(tensor), local, spec_as(tensor._spec, local.dtype), tensor._fsdpc)


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the numbers of the whole tensor, and keep this rank's part."""
    tensor = args[0]
    if next((t for t in _tensors((*args[1:], *kwargs.values()))), None) is not None:
        raise NotImplementedError(
            f"{_word(func)} of {name_of(tensor)} with tensors as arguments: draw a full tensor, "
            "and copy it inside summon_full_params()"
        )
    written = _written(func, args)
    _check_writes(func, written)
    local = tensor._local_tensor
    stride = tensor.stride()  # the order of drawing depends on it
    whole = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=local.device)
    part = part_of(tensor, func(whole, *args[1:], **kwargs))
    if not written:
        spec = spec_as(tensor._spec, part.dtype)
        return wrap(_kind_of(tensor), part.clone(), spec, tensor._fsdpc)
    local.copy_(part)
    _count(written)
    return tensor


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that draws random numbers for its result on whole tensors."""
    return _again(_on(_whole, func, args, kwargs), _ours((*args, *kwargs.values())))


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``copy_()``; copying a tensor onto itself, as loading does, changes nothing."""
    to, source = args[:2]
    if isinstance(source, DTensor) and isinstance(to, ShardedTensor):
        if rows_of(source) is rows_of(to):
            return to
    return _elementwise(func, args, kwargs)


def part_of(tensor: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor that is equal on all ranks."""
    spec = tensor._spec
    if isinstance(tensor, ShardedTensor) and not isinstance(tensor, DerivedTensor):
        home = tensor.home()
        if home is not None:
            return home[0].own_rows(home[1], whole)
    return distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None)._local_tensor


def _out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``out=``: compute the whole result, of which each rank keeps its part."""
    out = kwargs["out"]
    if not isinstance(out, ShardedTensor):
        return by_torch(func, args, kwargs)
    _check_writes(func, [out])
    whole = torch.empty(out.shape, dtype=out.dtype, device=out._local_tensor.device)
    result = _on(_whole, func, args, {k: v for k, v in kwargs.items() if k != "out"}, out=whole)
    if result.shape != out.shape:
        raise ValueError(
            f"{_word(func)} with out= of {name_of(out)}, and the result is {tuple(result.shape)}"
        )
    out._local_tensor.copy_(part_of(out, whole))
    _count([out])
    return out


def _whole(tensor: DTensor) -> torch.Tensor:
    """Return a DTensor whole, as a plain tensor; collective."""
    spec = tensor._spec
    if isinstance(tensor, ShardedTensor) and not isinstance(tensor, DerivedTensor):
        home = tensor.home()
        if home is not None:
            return gathered(tensor, *home)
    with torch.no_grad():
        base = DTensor(tensor._local_tensor, spec, requires_grad=False)
        return base.redistribute(placements=[Replicate()] * spec.mesh.ndim)._local_tensor


def _on(
    change: Callable[[DTensor], torch.Tensor],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    **more: Any,
) -> Any:
    """Run an operation on plain tensors, into which ``change`` turns the DTensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(plain, value))
        return change(value) if isinstance(value, DTensor) else value

    return func(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()}, **more)


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``item()`` and the like; collective unless the tensor is replicated."""
    tensor = args[0]
    if tensor.numel() != 1:
        raise RuntimeError(
            f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar: this rank has "
            f"{name_of(tensor)}; full_tensor() has all"
        )
    return func(_whole(tensor))


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``torch.equal``, which says the same on all ranks; collective."""
    for other in _tensors(args):
        if not isinstance(other, DTensor) and other.dim() and _is_mixed(other):
            refuse_mixed(_word(func), _ours(args), other)
    return _on(lambda t: t.full_tensor(), func, args, kwargs)


def _put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``x[mask] = number``, which is elementwise."""
    tensor, indices, values = args[:3]
    is_mask = len(indices) == 1 and isinstance(indices[0], DTensor)
    if is_mask and indices[0].dtype is torch.bool and not values.dim() and not args[3:]:
        return run(_aten.masked_fill_.Tensor, (tensor, indices[0], values), {})
    return by_torch(func, args, kwargs)


# ---- operations by torch ----


def _is_uneven(spec: DTensorSpec) -> bool:
    """Return whether some rank has less of a tensor than another, or its rows are strided."""
    return any(
        is_cut(p) and (not p.is_shard() or spec.shape[p.dim] % spec.mesh.size(k))
        for k, p in enumerate(spec.placements)
    )


def _is_view(func: Any) -> bool:
    alias = [r.alias_info for r in func._schema.returns]
    return bool(alias) and all(a is not None and not a.is_write for a in alias)


def by_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation by torch's DTensor; locally if all operands are replicated."""
    values = list(_tensors((*args, *kwargs.values())))
    ours = _ours(values)
    if func is _aten.cat.default and not torch.is_grad_enabled():
        args = ([_zeros(v, ours) for v in args[0]], *args[1:])
        values = args[0]
    for other in values:
        if type(other) in _PLAIN and _is_mixed(other):
            refuse_mixed(_word(func), ours, other)
    written = _written(func, args) if func._schema.is_mutable else []
    if any(type(t) in _PLAIN for t in _tensors(written)):
        raise RuntimeError(
            f"{_word(func)} writes into a plain tensor and reads {name_of(ours)}: use full_tensor()"
        )
    _check_writes(func, written)
    try:
        return _by_torch(func, args, kwargs, values, ours, written)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if name_of(ours) in str(error):
            raise
        names = {name_of(v): None for v in values if isinstance(v, ShardedTensor)}
        raise type(error)(f"{_word(func)} of {' and '.join(names)}: {error}") from error


def _zeros(value: Any, ours: ShardedTensor) -> Any:
    """Return zeros, which backwards of splits create as plain tensors, as a DTensor."""
    if type(value) in _PLAIN and not value.any():
        return replicated(value, ours)
    return value


def _by_torch(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: list[torch.Tensor],
    ours: ShardedTensor,
    written: list[Any],
) -> Any:
    specs = [v._spec for v in values if isinstance(v, DTensor)]
    if not written:
        is_view = _is_view(func)
        alike = all(s.mesh == specs[0].mesh for s in specs)
        if alike and all(map(is_replicated, specs)):
            result = _again(_on(local_of, func, args, kwargs), ours, not is_view)
            for view in _tensors([result]) if is_view else ():
                _marked(view, ours)
            return result
        if alike and not is_view and any(map(_is_uneven, specs)):
            return _again(_on(_whole, func, args, kwargs), ours)
        if is_view:
            return _view(func, args, kwargs, ours)
    result = _dispatched(func, args, kwargs)
    if written:
        _count(written)
        return None if result is None else args[0]
    return _derived(result, ours)


def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return DTensor.__torch_dispatch__.__func__(ShardedTensor, func, (), args, kwargs)  # type: ignore[attr-defined]


def _again(result: Any, ours: ShardedTensor, cuts: bool = True) -> Any:
    """Return a result that all ranks have computed alike as replicated DTensors.

    If it has the parameter's shape, as gradients have, each rank keeps its rows if ``cuts``.
    """
    if isinstance(result, (list, tuple)):
        return type(result)(_again(r, ours, cuts) for r in result)
    if not isinstance(result, torch.Tensor):
        return result
    home = ours.home()
    if cuts and home is not None and result.shape == home[0].shapes[home[1]]:
        return home[0].wrap(home[1], home[0].own_rows(home[1], result).clone())
    return replicated(result, ours)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ours: ShardedTensor) -> Any:
    """Run an operation that returns views. If a view is not cut, torch has copied the rows."""
    try:
        result = _derived(_dispatched(func, args, kwargs), ours, False)
    except RuntimeError:
        if not _is_uneven(ours._spec):
            raise
        result = _again(_on(_whole, func, args, kwargs), ours, False)
    was_cut = any(map(is_cut, ours._spec.placements))
    for view in _tensors([result]):
        if isinstance(view, ShardedTensor):
            _share_version(view, ours)
            _marked(view, ours)
            if was_cut and not any(map(is_cut, view._spec.placements)):
                view._fsdpc_lost = LOST_ROWS
    return result


def _share_version(view: ShardedTensor, base: ShardedTensor) -> None:
    """Let a view count its writes in the version of the rows that it shows."""
    local, rows = rows_of(view), rows_of(base)
    if type(local) is torch.Tensor and _place_of(local) == _place_of(rows):
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            view._local_tensor = rows.as_strided(
                local.shape, local.stride(), local.storage_offset()
            )


def _place_of(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _derived(result: Any, ours: ShardedTensor, cuts: bool = True) -> Any:
    """Return torch's result with the parameter that it came from, reduced if it is partial."""
    if isinstance(result, (list, tuple)):
        return type(result)(_derived(r, ours, cuts) for r in result)
    if type(result) is not DTensor:
        return result
    spec = result._spec
    if any(p.is_partial() for p in spec.placements):
        with torch.no_grad():
            result = result.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in spec.placements]
            )
    if is_replicated(result._spec):
        return _again(result._local_tensor, ours, cuts)
    return wrap(DerivedTensor, result._local_tensor, result._spec, ours._fsdpc)


_KEEPS = {
    "clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like", "contiguous",
    "alias",
}  # fmt: skip
_RANDOM = {
    "normal_", "uniform_", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "random_", "rand_like", "randn_like", "randint_like",
}  # fmt: skip
_ELEMENTWISE = {"fill_", "zero_"}
_REDUCES = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def _handler_of(func: Any) -> Handler:
    name = _word(func)
    if name in _KEEPS:
        return _like
    if name in _RANDOM:
        return _random
    if torch.Tag.nondeterministic_seeded in func.tags and not func._schema.is_mutable:
        return _drawn
    if any(a.name == "out" for a in func._schema.arguments):
        return _out
    listed = name.startswith(("_foreach_", "_fused_")) and name not in _REDUCES
    if listed or name in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return _elementwise
    return by_torch


_HANDLERS: dict[Any, Handler] = {
    _aten.detach.default: _detach,
    _aten._local_scalar_dense.default: _item,
    _aten.index_put_.default: _put,
    _aten.equal.default: _equal,
    _aten.copy_.default: _copy,
}
