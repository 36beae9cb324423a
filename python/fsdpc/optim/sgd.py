"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpc.optim.optimizer import Optimizer


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as in torch.optim.SGD.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`AdamW`.
    lr : float, default 1e-3
    momentum : float, default 0
        If 0, the optimizer has no states.
    dampening : float, default 0
        Reduces the gradient that is added to the momentum, except in the first step.
    weight_decay : float, default 0
        Added to the gradient.
    nesterov : bool, default False
        Requires momentum and no dampening.
    maximize : bool, default False
    state_dtype : dtype, default float32
    seed : int, default 0
        The last two, the notes and the errors are as in :class:`AdamW`.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([1.0]))
    >>> optimizer = optim.SGD([p], lr=0.1, momentum=0.9)
    >>> (2 * p).sum().backward()
    >>> optimizer.step()
    >>> round(p.item(), 4)
    0.8
    """

    _KIND = "SGD"
    _USUAL = {"lr": 0.1, "momentum": 0.9}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: Any = None,
        seed: int = 0,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                        nesterov=nesterov, maximize=maximize)  # fmt: skip
        super().__init__(params, defaults, state_dtype=state_dtype, seed=seed)
