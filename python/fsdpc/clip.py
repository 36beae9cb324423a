"""Clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc._core import Tensor
from fsdpc.nn.module import Module, Parameter


def clip_grad_norm_(
    module: Module | Iterable[Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; collective.

    Parameters
    ----------
    module : Module or iterable of Parameter
        Whose gradients count; whole units at a time where they are sharded, without ignored ones.
    max_norm : float
        ``inf`` measures without scaling.
    norm_type : float, default 2
        2 is supported.
    error_if_nonfinite : bool, default False
        Raise if the norm is NaN or infinite; gradients are left as they are.

    Returns
    -------
    Tensor, 0-d float64
        The norm over all ranks before clipping. Its bits depend neither on the world size nor on
        the layout: squares are summed in float64 over fixed leaves and added exactly.

    Raises
    ------
    FloatingPointError
        The norm is not finite and ``error_if_nonfinite`` is set; names the parameters.
    ValueError
        Some parameters are sharded and others have gradients but no unit and are not ignored.

    Notes
    -----
    Sharded gradients are not touched: the factor is applied by the optimizer while it reads them,
    or by whoever reads ``.grad`` first.
    """
    if norm_type != 2:
        raise NotImplementedError(f"norm_type {norm_type}: only 2 is supported yet")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}")
    named = _named(module)
    units: list[Any] = []
    for _, p in named:
        if p._unit is not None and p._unit not in units:
            units.append(p._unit)
    plain = _plain_grads(named, bool(units))
    norm = _core.grad_norm(units, plain)
    if error_if_nonfinite and not math.isfinite(norm):
        where = ", ".join(_nonfinite(named, bool(units)))
        raise FloatingPointError(
            f"the global gradient norm is {norm}: gradients hold NaN or infinity, in {where}; drop "
            "them (zero_grad()) and go on, or set error_if_nonfinite=False"
        )
    _core.scale_grads(units, plain, norm, float(max_norm))
    return _core.tensor(norm, dtype=_core.float64)


def _named(module: Module | Iterable[Parameter]) -> list[tuple[str, Parameter]]:
    if isinstance(module, Module):
        return list(module.named_parameters())
    params = [module] if isinstance(module, Parameter) else list(module)
    return [(getattr(p, "_name", f"number {i}"), p) for i, p in enumerate(params)]


def _plain_grads(named: list[tuple[str, Parameter]], beside_units: bool) -> list[Tensor]:
    """Gradients that are not sharded; beside sharded ones they would differ between ranks."""
    plain = [
        (name, p) for name, p in named if p._unit is None and not getattr(p, "_ignored", False)
    ]
    plain = [(name, p) for name, p in plain if p.grad is not None]
    if beside_units and plain:
        names = ", ".join(f"'{name}'" for name, _ in plain)
        raise ValueError(
            f"{names}: held by no unit, so the norm would differ between ranks; call fully_shard() "
            "on the module around them, or give them as its ignored_params"
        )
    return [p.grad for _, p in plain]


def _nonfinite(named: list[tuple[str, Parameter]], collective: bool) -> list[str]:
    """Names of the parameters whose gradients are not finite, on any rank."""
    grads = [None if getattr(p, "_ignored", False) else p.grad for _, p in named]
    bad = [g is not None and not math.isfinite(_core.grad_norm([], [g])) for g in grads]
    flags = np.array(bad, dtype=np.int64)
    if collective:
        flags = distributed.all_reduce(flags, "max")
    return [f"'{name}'" for (name, _), flag in zip(named, flags, strict=True) if flag]
