"""Norms of gradients and parameters over all ranks.

The engine computes norms exactly from all ranks' rows. The first read computes the norms of all
gradients of the model in one small collective. Later reads return those results until the gradient
changes. The decision to compute depends only on the program and never on this rank's rows, so all
ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsdpc import _core
from fsdpc.torch import _device
from fsdpc.torch._dtensor import (
    DerivedTensor,
    ShardedGrad,
    ShardedTensor,
    replicated,
)
from fsdpc.torch._operations import by_torch, handle
from fsdpc.torch._param_layout import local_of, ranks_of

if TYPE_CHECKING:
    from fsdpc.torch._unit import Root, UnitState

Held = tuple["UnitState", int, ShardedTensor]

#: How much the norms of equal gradients may differ; GPUs add in varying orders.
_AGREE = 1e-4


class Measured:
    """Tracks which norms of a model are known, and whether the next miss computes one norm or all.

    If at least half of the norms are outdated, all of them are computed. With n gradients, this is
    checked once every n/8 misses, so a loop that changes each gradient after reading it takes
    linear time. Reads of known norms are not counted, because their number may differ between
    ranks.
    """

    def __init__(self) -> None:
        self.age: int = 0  # generation of gradients: results from earlier ones are invalid
        self.misses: dict[_core.Comm, int] = {}  # by shard group: the ranks that read together

    def outdate(self) -> None:
        """Record that gradients changed without torch's knowledge."""
        self.age += 1
        self.misses.clear()

    def is_known(self, grad: ShardedGrad, order: float) -> bool:
        """Return whether the norm stored in a gradient is up to date."""
        known = grad._fsdpc_norm
        return known is not None and known[0] == (order, self.age, grad._local_tensor._version)

    def missing(self, one: Held, order: float, root: Root) -> list[Held]:
        """Return the gradients whose norms to compute if the norm of ``one`` is unknown."""
        comm = one[0].comms[0]
        if self.misses.get(comm, 0) > 0:
            self.misses[comm] -= 1
            return [one]
        held = [each for each in root.grads() if each[0].comms[0] is comm]
        if 2 * sum(not self.is_known(g, order) for _, _, g in held) >= len(held):
            return held
        self.misses[comm] = len(held) // 8
        return [one]


def _measure(tensors: Sequence[Held], order: float) -> torch.Tensor:
    """Compute whole tensors' norms exactly, in float64, from each rank's rows; collective."""
    groups: dict[_core.Comm, list[int]] = {}
    for k, (state, _, _) in enumerate(tensors):
        groups.setdefault(state.comms[0], []).append(k)
    norms = torch.empty(len(tensors), dtype=torch.float64)
    for at in groups.values():
        held = [tensors[k] for k in at]
        values = _core.norms_of_rows(
            [state.unit for state, _, _ in held],
            [index for _, index, _ in held],
            [_device.to_engine(_stored(*each)) for each in held],
            order,
        )
        norms[at] = torch.tensor(values, dtype=torch.float64)
    for comm in other_comms(((s, i) for s, i, _ in tensors), cut_only=True):
        at = [k for k, (s, i, _) in enumerate(tensors) if comm in s.comms_of(i, cut_only=True)]
        norms[at] = _combined(norms[at], order, comm)
    return norms.to(_device.home())


def _stored(state: UnitState, index: int, tensor: ShardedTensor) -> torch.Tensor:
    """Return a tensor's rows as the unit stores them."""
    return state.layouts[index].rows_of(tensor._local_tensor.detach()).contiguous()


# ---- parameters that are DTensors over another mesh, too ----


def other_comms(
    homes: Iterable[tuple[UnitState, int]], cut_only: bool = False
) -> list[_core.Comm]:
    """Return the communicators of parameters' other meshes, in an order that all ranks share."""
    return list(dict.fromkeys(c for s, i in homes for c in s.comms_of(i, cut_only)))


def _combined(norms: torch.Tensor, order: float, comm: _core.Comm) -> torch.Tensor:
    """Return the norms of tensors whose parts on each rank have these norms; collective."""
    if math.isinf(order):
        return _reduced(norms, "max" if order > 0 else "min", comm)
    if order == 0:
        return _reduced(norms, "sum", comm)
    return _reduced(norms**order, "sum", comm) ** (1 / order)


def _reduced(values: torch.Tensor, how: str, comm: _core.Comm) -> torch.Tensor:
    result = _core.tensor(values.numpy())
    comm.all_reduce(result, how)
    return torch.from_numpy(result.numpy())


def agreed(tensors: Sequence[Held], norms: torch.Tensor) -> torch.Tensor:
    """Return norms that are equal on all ranks of the tensors' other meshes; collective.

    A parameter of a tensor parallel model that is not a DTensor itself has a copy on each rank of
    the other mesh, and equal gradients if the model treats it as replicated.

    Raises
    ------
    RuntimeError
        The error names the first parameter whose norms differ.
    """
    for comm in other_comms((s, i) for s, i, _ in tensors):
        both = _reduced(torch.cat([norms, -norms]).cpu(), "max", comm)
        most, least = both.split(len(norms))
        for k in ((most + least).abs() > _AGREE * most.abs()).nonzero().flatten().tolist():
            state, index, _ = tensors[k]
            raise RuntimeError(
                f"the norm of {state.params[index].fsdpc} is {-least[k]:.6g} to {most[k]:.6g} on "  # type: ignore[attr-defined]
                f"the {comm.size} ranks of another mesh. It is not a DTensor over that mesh, so it "
                "should have the same gradient on these ranks. Make it a DTensor with "
                "parallelize_module, or give fully_shard a mesh of all of these ranks for its "
                "module"
            )
        norms = most.to(norms.device)
    return norms


def total_norm(states: Sequence[UnitState], order: float) -> float:
    """Return the norm of all gradients of units, over the other meshes as well; collective."""
    held: list[Held] = [
        (s, i, p.grad)
        for s in states
        for i, p in enumerate(s.params)
        if isinstance(p.grad, ShardedTensor)
    ]
    return float(torch.linalg.vector_norm(agreed(held, _measure(held, order)), order))


def _held(tensor: Any) -> Held | None:
    """Return a tensor with its unit, if its rows are those of a parameter."""
    if not isinstance(tensor, ShardedTensor) or isinstance(tensor, DerivedTensor):
        return None
    home = tensor.home()
    return None if home is None or not tensor.is_floating_point() else (*home, tensor)


def _norm_of(held: Held, order: float) -> torch.Tensor:
    """Return the norm of a whole tensor; for a gradient, from those computed for the model."""
    state, index, tensor = held
    own = state.params[index].grad
    of = getattr(tensor, "_fsdpc_of", None)
    of = tensor if of is None else of
    if state.root is None or of is not own or not isinstance(own, ShardedGrad):
        return _measure([held], order)[0].to(tensor.dtype)
    measured = state.root.measured
    if not measured.is_known(own, order):
        stale = measured.missing((state, index, own), order, state.root)
        for (_, _, g), norm in zip(stale, _measure(stale, order).unbind(), strict=True):
            g._fsdpc_norm = ((order, measured.age, g._local_tensor._version), norm.to(g.dtype))
    return own._fsdpc_norm[1].clone()  # type: ignore[index]


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``norm`` and ``linalg.vector_norm``, whose arguments are (x, order, dim, ...)."""
    given = dict(zip(("x", "order", "dim", "keepdim"), args, strict=False)) | kwargs
    x, dim = given["x"], given.get("dim")
    order = next((given[k] for k in ("order", "ord", "p") if given.get(k) is not None), 2)
    held = _held(x)
    is_over_all = not dim or len(dim) == x.dim()
    if held is None or not is_over_all or given.get("keepdim"):
        return by_torch(func, args, kwargs)
    value = _norm_of(held, float(order))
    return replicated(value.to(given.get("dtype") or x.dtype), x)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    norms: dict[int, Any] = {}
    for at, held in _by_root(tensors):
        values, mesh = _measure(held, order), _common_mesh(held)
        if mesh is not None:
            values = agreed(held, values)
        for k, (state, i, t), value in zip(at, held, values.unbind(), strict=True):
            norms[k] = replicated(value.to(t.dtype), t, mesh or state.mesh_of(i))
    return [
        norms[k] if k in norms else torch.linalg.vector_norm(t, order)
        for k, t in enumerate(tensors)
    ]


def _common_mesh(tensors: Sequence[Held]) -> Any:
    """Return a mesh whose ranks all have these tensors' norms, or None.

    It has the ranks of each tensor's mesh, or the dimensions of the tensor's unit's mesh.
    """
    most = max(tensors, key=lambda held: held[0].mesh_of(held[1]).ndim)
    mesh = most[0].mesh_of(most[1])
    for state, index, _ in tensors:
        own = state.mesh_of(index)
        if own is mesh or state.recipe.mesh == most[0].recipe.mesh:
            continue
        if ranks_of(own) != ranks_of(mesh):
            return None
    return mesh


def _by_root(tensors: Sequence[torch.Tensor]) -> Iterable[tuple[list[int], list[Held]]]:
    """Yield the sharded tensors in a list with their positions, grouped by model."""
    found: dict[int, tuple[list[int], list[Held]]] = {}
    for k, tensor in enumerate(tensors):
        if (held := _held(tensor)) is not None:
            at, of = found.setdefault(id(held[0].root or held[0]), ([], []))
            at.append(k)
            of.append(held)
    return found.values()


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement GradScaler's unscaling; an infinity on one rank is reported on all ranks."""
    grads, found, scale = args
    func([local_of(g) for g in grads], found, scale)
    held = [h for h in map(_held, grads) if h is not None]
    for comm in dict.fromkeys(c for s, i, _ in held for c in (*s.comms, *s.comms_of(i))):
        if comm.size > 1 and found.numel():
            comm.all_reduce(_device.to_engine(found.detach()), "max")


_aten = torch.ops.aten
for _op in (
    _aten.linalg_vector_norm.default,
    _aten.norm.Scalar,
    _aten.norm.ScalarOpt_dim,
    _aten.norm.ScalarOpt_dtype,
    _aten.norm.ScalarOpt_dim_dtype,
):
    handle(_op, _norm)
handle(_aten._foreach_norm.Scalar, _foreach_norm)
handle(_aten._amp_foreach_non_finite_check_and_unscale_.default, _unscale)
