"""Adafactor, whose second moments are means by row and by column of each matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fsdpc import _core
from fsdpc.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from fsdpc.nn.module import Parameter

MEANS = ("row_var", "col_var")


def is_mean(state: str) -> bool:
    """Return whether a state's name is that of means by row or by column."""
    return state in MEANS


def is_whole(state: str, shape: tuple[int, ...]) -> bool:
    """Return whether every rank has all of a state: of means by column, whose rows are spread."""
    return state == "col_var" and len(shape) == 2


def state_names(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the states of a parameter of this shape."""
    if len(shape) < 2:
        return ("variance",)
    return MEANS if 0 not in shape else ()


def shape_of(state: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a state of a parameter of this shape."""
    if not is_mean(state):
        return tuple(shape)
    return (*shape[:-1], 1) if state == "row_var" else (*shape[:-2], 1, shape[-1])


def place_of(
    state: str, shape: tuple[int, ...], first: int
) -> tuple[tuple[int, ...], int]:
    """Return the shape of means, and the place of those whose rows begin at element ``first``."""
    if is_whole(state, shape):
        return shape_of(state, shape), 0
    return shape_of(state, shape), first // (shape[-1] if state == "row_var" else shape[-2])


def engine_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options as the engine reads them."""
    options = dict(group)
    eps = options.pop("eps")
    pair = eps if isinstance(eps, (tuple, list)) and len(eps) == 2 else (eps, None)
    low, least = (isinstance(each, (int, float)) and each >= 0 for each in pair)
    if not least or not (low or pair[0] is None):
        raise ValueError(f"eps must be (number or None, number), of at least 0, got {eps!r}")
    return {**options, "eps1": -1.0 if pair[0] is None else pair[0], "eps2": pair[1]}


class Adafactor(Optimizer):
    """Adafactor as in torch.optim.Adafactor: second moments of rows and columns, no momentum.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        As for :class:`AdamW`.
    lr : float, default 1e-2
        The largest relative step; step t takes at most 1 / sqrt(t).
    beta2_decay : float, default -0.8
        Step t moves the second moments by t ** beta2_decay. At most 0.
    eps : (float or None, float), default (None, 1e-3)
        Lower bounds of the root of a second moment (None: the epsilon of the parameter's dtype),
        and of the parameter's root mean square.
    d : float, default 1.0
        Largest root mean square of an update, at least 1.
    weight_decay : float, default 0
        Decoupled, as in :class:`AdamW`.
    maximize : bool, default False

    Raises
    ------
    ValueError
        As for :class:`AdamW`.
    NotImplementedError
        In the first step: masters, gradients or states are offloaded.

    Notes
    -----
    A parameter with two or more dimensions has the states ``row_var`` (..., rows, 1) and
    ``col_var`` (..., 1, columns) in float32, others ``variance``. Parameters and states have the
    same bits for any number of ranks. They differ from torch's by the rounding of its sums.

    Source: Shazeer and Stern, Adafactor: Adaptive learning rates with sublinear memory cost, 2018.

    Examples
    --------
    >>> from fsdpc import nn, optim, tensor
    >>> p = nn.Parameter(tensor([[2.0, 1.0], [1.0, 1.0]]))
    >>> optimizer = optim.Adafactor([p], lr=0.1)
    >>> (3 * p).sum().backward()
    >>> optimizer.step()
    >>> [round(x, 4) for x in p.numpy().ravel().tolist()]
    [1.8677, 0.8677, 0.8677, 0.8677]
    """

    _KIND = "Adafactor"
    _USUAL = {"lr": 1e-2}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, dict(
            lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay,
            maximize=maximize,
        ))  # fmt: skip

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return engine_options(super()._options(group))

    def _state_names(self, p: Parameter) -> tuple[str, ...]:
        return state_names(p.shape)

    def _state_shape(self, p: Parameter, name: str) -> tuple[int, ...]:
        return shape_of(name, p.shape)

    def _codes(self, p: Parameter) -> list[tuple[str, str]]:
        return [(name, "") for name in self._state_names(p)]

    def _view(
        self, p: Parameter, which: int, name: str, write: bool = False
    ) -> _core.Tensor | None:
        if p._unit is None or not is_mean(name):
            return super()._view(p, which, name, write)
        if not write and self.step_count(p) == 0:
            return None
        return self._core.factors(p._unit, p._index)[which]

    def _maxima(
        self, p: Parameter, which: int, name: str, write: bool = False
    ) -> _core.Tensor | None:
        return None

    def _collect(self, p: Parameter, which: int) -> _core.Tensor:
        if len(p.shape) < 2:
            return super()._collect(p, which)
        return self._core.factors(p._unit, p._index, True)[which]

    def _write_full(self, p: Parameter, which: int, value: _core.Tensor) -> None:
        if len(p.shape) < 2:
            super()._write_full(p, which, value)
            return
        own = self._core.factors(p._unit, p._index)[which]
        _, begin, _, _ = _core.master_shard(p._unit, p._index, False)
        _, first = place_of(MEANS[which], tuple(p.shape), begin)
        rows = value.to(_core.float32).reshape(-1)
        own.reshape(-1).copy_(rows[first : first + own.numel()])


__all__ = ["Adafactor"]
