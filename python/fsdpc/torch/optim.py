"""Optimizers that step whole flat shards in C, as subclasses of ``torch.optim.Optimizer``."""

from __future__ import annotations

from typing import Any

import torch

from fsdpc import _core
from fsdpc.torch._unit import PieceInfo, UnitState, take_grads


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` over the pieces of sharded modules: one pass over memory a step.

    Parameters
    ----------
    params : iterable
        Parameters of sharded modules, or groups of them with options of their own.
    lr : float or Tensor, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0.01
    amsgrad : bool
        False; the maximum of second moments is not kept.
    maximize : bool, default False
    foreach, capturable, differentiable, fused : optional
        Accepted where they mean nothing here; the step is fused always.

    Raises
    ------
    ValueError
        An option is out of range, or a parameter belongs to no sharded module.
    """

    _kind = "AdamW"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if amsgrad or differentiable:
            raise NotImplementedError("amsgrad and differentiable steps: use torch.optim on pieces")
        self._core = _core.Optimizer(self._kind)
        self._states: dict[int, UnitState] = {}
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "maximize": maximize, "amsgrad": False, "foreach": foreach, "capturable": capturable,
            "differentiable": False, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        _check(self.param_groups[group])
        for p in self.param_groups[group]["params"]:
            info = getattr(p, "fsdpc", None)
            if not isinstance(info, PieceInfo):
                raise ValueError(
                    f"a parameter {tuple(p.shape)} belongs to no sharded module: call fully_shard "
                    "before making the optimizer; give ignored parameters to one of torch.optim"
                )
            self._states[id(info._state)] = info._state
            self._core.add(info.unit, info._index, group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update parameters by their gradients; collective.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for i, g in enumerate(self.param_groups):
            b1, b2 = g["betas"]
            self._core.set_hyper(
                i, lr=float(g["lr"]), betas=(float(b1), float(b2)), eps=float(g["eps"]),
                weight_decay=float(g["weight_decay"]), maximize=bool(g["maximize"]),
            )  # fmt: skip
        take_grads(list(self._states.values()))
        self._core.step()
        return loss


class Adam(AdamW):
    """``torch.optim.Adam``: as :class:`AdamW`, with decay joining the gradient.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad
        As of :class:`AdamW`; ``weight_decay`` is 0 where not given.
    options
        The keyword options of :class:`AdamW`.
    """

    _kind = "Adam"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def _check(group: dict[str, Any]) -> None:
    b1, b2 = group["betas"]
    bounds = {
        "lr": float(group["lr"]) >= 0,
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "betas": 0 <= b1 < 1 and 0 <= b2 < 1,
    }
    for name, fine in bounds.items():
        if not fine:
            raise ValueError(f"{name} is out of range: {group[name]}")
