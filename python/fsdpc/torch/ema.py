"""Averages of weights of sharded modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdpc.optim.ema import STATE, Averages, Decay, averaged
from fsdpc.torch import optim_state
from fsdpc.torch._flat_optimizer import FlatOptimizer


class _Optimizer(FlatOptimizer):
    """The averages as an optimizer's states; checkpoints read it like any other."""

    _kind = "EMA"

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {"decay": 0.0, "swap": False})

    def move(self, decay: float, swap: bool) -> None:
        self.param_groups[0].update(decay=decay, swap=swap)
        self._pass_hypers()
        for state in self._units.values():
            state.torch_unit.follow()
        self._core.step()


class EMA(Averages):
    """Averages of a sharded module's parameters, for evaluation; see :class:`fsdpc.EMA`.

    Parameters
    ----------
    model : nn.Module
        All of its trainable parameters are sharded.
    decay : float or callable, default 0.999
        The share of an average that an update keeps, in [0, 1); or a function of the number of
        updates so far that returns it.
    every : int, default 1
        Only every k-th call of :meth:`update` does something.

    Raises
    ------
    ValueError
        An option is out of range; or a trainable parameter is not sharded, or neither float32 nor
        float64.

    Notes
    -----
    Averages have the bits of ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)`` on the unsharded model. They are sharded like an optimizer's
    states. Buffers are not averaged; ``update_bn`` of torch inside :meth:`swap` renews BatchNorm's.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import EMA, fully_shard
    >>> model = fully_shard(torch.nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> ema = EMA(model, decay=0.99)
    >>> for _ in range(2):
    ...     model(torch.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    ...     ema.update()
    >>> with ema.swap():
    ...     average = model(torch.ones(1, 4))
    >>> bool((average > model(torch.ones(1, 4))).all())
    True
    >>> warm = EMA(model, lambda n: min(0.999, (1 + n) / (10 + n)))
    >>> equal = EMA(model, lambda n: n / (n + 1))  # of SWA: all updates count alike
    """

    def __init__(self, model: nn.Module, decay: Decay = 0.999, *, every: int = 1) -> None:
        super().__init__(decay, every)
        names = optim_state._names(model)
        named = {names[id(p)]: p for p in model.parameters()}
        plain = {n: p for n, p in named.items() if not hasattr(p, "fsdpc")}
        if strays := [n for n, p in plain.items() if p.requires_grad]:
            raise ValueError(
                f"{len(strays)} trainable parameters are not sharded, the first is '{strays[0]}': "
                "call fully_shard() before making the EMA; torch.optim.swa_utils.AveragedModel "
                "averages unsharded modules"
            )
        sharded = ((n, p) for n, p in named.items() if n not in plain)
        self._params = averaged((n, p, str(p.dtype).removeprefix("torch.")) for n, p in sharded)
        self.optimizer: Any = _Optimizer(list(self._params.values()))

    def _named(self) -> dict[str, Any]:
        return self._params

    @torch.no_grad()
    def _move(self, decay: float, swap: bool) -> None:
        self.optimizer.move(decay, swap)

    def _average(self, p: Any) -> Any:
        if self.optimizer._steps_of(p) == 0:
            return None
        rows = self.optimizer.state_tensors(p)[STATE]
        return rows.full_tensor() if isinstance(rows, DTensor) else rows.clone()

    @torch.no_grad()
    def _set_average(self, p: Any, value: Any, updates: int) -> None:
        if value is None:
            self.optimizer.set_shard_state(p, {})
            return
        rows = optim_state._own(p, STATE, torch.as_tensor(value))
        self.optimizer.set_shard_state(p, {"step": updates, STATE: rows})
