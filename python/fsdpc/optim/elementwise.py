"""Optimizers whose step treats each element separately: the rows of the engine's table."""

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
    state_dtype : dtype, "int8" or Int8, default float32
        float32, bfloat16 or "int8". bfloat16 states are rounded stochastically, so their expected
        value is exact. "int8" takes a byte per element (:class:`Int8`), without amsgrad. States of
        float64 parameters are always float64.
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
    state_dtype : dtype, "int8" or Int8, default float32
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
    state_dtype : dtype, "int8" or Int8, default float32
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
    state_dtype : dtype, "int8" or Int8, default float32
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


class RMSprop(Optimizer):
    """Gradients divided by the root of their mean square, as in torch.optim.RMSprop.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`AdamW`.
    lr : float, default 1e-2
    alpha : float, default 0.99
        Share of the old mean square that is kept.
    eps : float, default 1e-8
    weight_decay : float, default 0
        Added to the gradient.
    momentum : float, default 0
        If 0, the optimizer has one state.
    centered : bool, default False
        Divide by the root of the variance instead. The optimizer then has three states.
    maximize : bool, default False
    state_dtype : dtype, "int8" or Int8, default float32
    seed : int, default 0
        The last two, the notes and the errors are as in :class:`AdamW`.

    Notes
    -----
    Source: Tieleman and Hinton, Lecture 6.5: RMSprop, 2012.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([1.0]))
    >>> optimizer = optim.RMSprop([p], lr=0.1, alpha=0.0)
    >>> (2 * p).sum().backward()
    >>> optimizer.step()
    >>> round(p.item(), 4)
    0.9
    """

    _KIND = "RMSprop"
    _USUAL = {"lr": 1e-3}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        state_dtype: Any = None,
        seed: int = 0,
    ) -> None:
        defaults = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum,
                        centered=centered, maximize=maximize)  # fmt: skip
        super().__init__(params, defaults, state_dtype=state_dtype, seed=seed)


__all__ = ["SGD", "Adam", "AdamW", "Lion", "RMSprop"]

#: Every optimizer by its name in commands and plans.
BY_NAME: dict[str, Any] = {name.lower(): globals()[name] for name in __all__}
