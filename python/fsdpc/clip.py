"""Clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fsdpc import _core
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
        Whose gradients count; whole units at a time where they are sharded.
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
        The norm is not finite and ``error_if_nonfinite`` is set.

    Notes
    -----
    Sharded gradients are not touched: the factor is applied by the optimizer while it reads them,
    or by whoever reads ``.grad`` first.
    """
    if norm_type != 2:
        raise NotImplementedError(f"norm_type {norm_type}: only 2 is supported yet")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}")
    params = module.parameters() if isinstance(module, Module) else module
    units: list[Any] = []
    plain: list[Tensor] = []
    for p in params:
        if p._unit is not None:
            if p._unit not in units:
                units.append(p._unit)
        elif p.grad is not None:
            plain.append(p.grad)
    norm = _core.grad_norm(units, plain)
    if not math.isfinite(norm):
        if error_if_nonfinite:
            raise FloatingPointError(
                f"the global gradient norm is {norm}: gradients hold NaN or infinity; skip this "
                "step, or set error_if_nonfinite=False"
            )
    _core.scale_grads(units, plain, norm, float(max_norm))
    return _core.tensor(norm, dtype=_core.float64)
