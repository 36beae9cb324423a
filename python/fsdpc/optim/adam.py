"""AdamW and Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpc.optim.optimizer import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay, as in torch.optim.AdamW.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        Parameters, with or without names, or groups ``{"params": [...], "lr": ..., ...}`` with
        their own options. Shard the model first.
    lr : float, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0.01
    amsgrad : bool, default False
        Divide by the maximum of all second moments so far, which is a third state.
    maximize : bool, default False
    state_dtype : dtype, default float32
        float32 or bfloat16. bfloat16 states are rounded stochastically, so their expected value is
        exact. States of float64 parameters are always float64.
    seed : int, default 0
        Seed for stochastic rounding; the same on every rank.

    Raises
    ------
    ValueError
        An option is out of range, a parameter occurs twice, or some parameters are sharded while
        other trainable ones neither belong to a unit nor are ignored.

    Notes
    -----
    ``step`` is collective over the ranks of sharded parameters. In one pass over memory, it applies
    the scale that clipping deferred, updates parameters, and writes the copy for the next forward.
    Parameters without a gradient are skipped. Results do not depend on sharding.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, 2019.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([1.0]))
    >>> optimizer = optim.AdamW([p], lr=0.1)
    >>> (2 * p).sum().backward()
    >>> optimizer.step()
    >>> round(p.item(), 4)
    0.899
    """

    _KIND = "AdamW"
    _USUAL = {"lr": 1.5e-3, "betas": (0.9, 0.95)}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: Any = None,
        seed: int = 0,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                        amsgrad=amsgrad, maximize=maximize)  # fmt: skip
        super().__init__(params, defaults, state_dtype=state_dtype, seed=seed)


class Adam(AdamW):
    """Adam with weight decay added to the gradient, as in torch.optim.Adam.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`AdamW`.
    lr : float, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0
    amsgrad : bool, default False
    maximize : bool, default False
    state_dtype : dtype, default float32
    seed : int, default 0
        The last four, the notes and the errors are as in :class:`AdamW`.

    Notes
    -----
    Source: Kingma and Ba, Adam: a method for stochastic optimization, 2015.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([1.0]))
    >>> optimizer = optim.Adam([p], lr=0.1)
    >>> (2 * p).sum().backward()
    >>> optimizer.step()
    >>> round(p.item(), 4)
    0.9
    """

    _KIND = "Adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize,
                         state_dtype=state_dtype, seed=seed)  # fmt: skip
