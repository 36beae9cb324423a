"""Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpc.optim.optimizer import Optimizer


class Lion(Optimizer):
    """Lion, which steps by the sign of the momentum, with one state and decoupled weight decay.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`AdamW`.
    lr : float, default 1e-4
        Use a third to a tenth of AdamW's.
    betas : (float, float), default (0.9, 0.99)
        For the sign, and for the stored momentum.
    weight_decay : float, default 0
        Use three to ten times AdamW's.
    maximize : bool, default False
    state_dtype : dtype, default float32
    seed : int, default 0
        The last two, the notes and the errors are as in :class:`AdamW`.

    Notes
    -----
    Source: Chen et al., Symbolic discovery of optimization algorithms, 2023, algorithm 2.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([1.0]))
    >>> optimizer = optim.Lion([p], lr=0.1)
    >>> (2 * p).sum().backward()
    >>> optimizer.step()
    >>> round(p.item(), 4)
    0.9
    """

    _KIND = "Lion"
    _USUAL = {"lr": 3e-4, "betas": (0.9, 0.99)}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: Any = None,
        seed: int = 0,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, state_dtype=state_dtype, seed=seed)
