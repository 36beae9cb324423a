"""Clip the gradients of torch models by their global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdpc import _core
from fsdpc.torch import _device
from fsdpc.torch._dtensor import PENDING, ShardedTensor, replicated
from fsdpc.torch._grads import total_norm
from fsdpc.torch._unit import check_same_ranks, take_grads

_APART = (
    "a total norm (take torch.nn.utils.get_total_norm of each mesh's gradients, sum its powers "
    "over the ranks that have other parameters, and give the root of the sum of all to "
    "clip_grads_with_norm_)"
)


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; collective.

    Parameters
    ----------
    parameters : nn.Module, tensor or iterable of tensors
        The model or parameters whose gradients are clipped.
    max_norm : float
        ``inf`` measures the norm without scaling.
    norm_type : float, default 2
    error_if_nonfinite : bool, default False
        Raise if the norm is NaN or infinite, and leave the gradients unchanged.
    foreach : bool, optional
        Accepted for compatibility.

    Returns
    -------
    Tensor, 0-d
        The norm over all ranks before clipping.

    Raises
    ------
    NotImplementedError
        Units are on meshes of different ranks; the error says how to compute the total.

    Notes
    -----
    Gradients of whole units are not scaled immediately: the optimizer applies the factor while it
    reads them, or the first access to ``.grad`` does. ``torch.nn.utils.clip_grad_norm_`` returns
    the same norm in more passes over memory.

    With expert parallelism, only the caller knows which parameters differ over which dimension of
    the mesh (here experts over "ep")::

        norms = [get_total_norm([p.grad for p in ps]) for ps in (experts, rest)]
        squares = [norm.full_tensor() ** 2 for norm in norms]
        dist.all_reduce(squares[0], group=mesh["ep"].get_group())
        for ps in (experts, rest):
            clip_grads_with_norm_(ps, max_norm, sum(squares) ** 0.5)

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import clip_grad_norm_, fully_shard
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> round(clip_grad_norm_(model, 1.0).item(), 4)  # sqrt(2 * 4 + 2)
    3.1623
    >>> round(clip_grad_norm_(model, 1.0).item(), 4)
    1.0
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with_grad = [p for p in params if p.grad is not None]
    for p in params if len(with_grad) < len(params) else ():
        if hasattr(p, "fsdpc"):
            p.fsdpc.unit.refuse_stepped()
    held = [getattr(p, "fsdpc", None) for p in with_grad]
    states = list({id(info._state): info._state for info in held if info is not None}.values())
    if states:
        check_same_ranks(states, _APART)
    whole = None not in held and _hold_whole_units(states, with_grad)
    # Gradients of narrow parameters are copies, so a factor deferred to the shards would not reach
    # them.
    if not states or not whole or any(s.is_narrow for s in states):
        return torch.nn.utils.clip_grad_norm_(
            with_grad, max_norm, norm_type, error_if_nonfinite, foreach
        )
    take_grads(states)
    units = [s.unit for s in states]
    is_over_others = any(layout.spec is not None for s in states for layout in s.layouts)
    if error_if_nonfinite or is_over_others:
        norm = (
            total_norm(states, float(norm_type))
            if is_over_others
            else _core.grad_norm(units, [], float(norm_type))
        )
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm}, so they cannot "
                "be clipped: they hold NaN or infinity; drop them, or set error_if_nonfinite=False"
            )
        _core.scale_grads(units, [], norm, float(max_norm))
        total = torch.tensor(norm, dtype=torch.float64, device=_device.home())
    else:  # on a GPU, without waiting
        total = _device.to_torch(_core.clip_grads(units, [], float(norm_type), float(max_norm)))
    PENDING.add(s for s in states if s.torch_unit.has_factor)
    wide = torch.float64 if any(p.dtype is torch.float64 for p in with_grad) else torch.float32
    total = total.to(wide)
    ours = with_grad[0]
    if not isinstance(ours, ShardedTensor):
        return total
    meshes = {s.mesh_of(i) for s in states for i in range(len(s.params))}
    return replicated(total, ours, max(meshes, key=lambda mesh: mesh.ndim))


def _hold_whole_units(states: list[Any], params: list[Any]) -> bool:
    """Return whether the parameters include every parameter of these units that has a gradient."""
    held = {id(p) for p in params}
    return all(p.grad is None or id(p) in held for s in states for p in s.params)
