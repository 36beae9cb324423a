"""Memory and traffic of a training step from a parameter count alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from fsdpc import _core
from fsdpc.device import check_device, get_default_device
from fsdpc.strategies import ShardingStrategy, as_strategy


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes per rank and per step, without activations.

    ``published`` is the arithmetic of the ZeRO paper: parameters, gradients and optimizer states,
    each whole or a world's share. ``held`` is what this engine has: the wire (on CPUs one copy a
    host, here counted whole on every rank's host; on a GPU the rank's own slices and the units that
    are whole at a time), masters, fp32 gradients and states, reduce buffers. ``sent`` is what a
    rank sends in a step over links; ranks of one host copy nothing to gather.
    """

    strategy: str
    published: float
    held: dict[str, float]
    sent: float

    @property
    def held_total(self) -> float:
        """All of ``held``."""
        return sum(self.held.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in self.held.items())
        return (
            f"{self.strategy}: published {self.published / 1e9:.4g} GB a rank; "
            f"held {self.held_total / 1e9:.4g} GB ({parts}); sent {self.sent / 1e9:.4g} GB a step"
        )


def estimate(
    *,
    params: float,
    world: int,
    strategy: ShardingStrategy | str = "FULL_SHARD",
    dtype: Any = None,
    states: int = 2,
    units: int = 32,
    device: str | None = None,
) -> Estimate:
    """Estimate a model's memory per rank and its traffic from its number of parameters.

    Parameters
    ----------
    params : float
        How many parameters, as 7e9.
    world : int
        Ranks that share them (of one shard group).
    strategy : ShardingStrategy or str, default FULL_SHARD
    dtype : dtype, default float32
        Of compute and communication.
    states : int, default 2
        fp32 states of the optimizer for each parameter (Adam: 2).
    units : int, default 32
        Equal units that the model is sharded in; they set the size of reduce buffers, and on a GPU
        how much is whole at a time.
    device : {"cpu", "cuda"}, optional
        That the ranks compute on, default this process's. A GPU need not be here.

    Examples
    --------
    >>> import fsdpc
    >>> [round(fsdpc.estimate(params=7e9, world=8, strategy=s).published / 1e9, 1)
    ...  for s in ("NO_SHARD", "SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD")]
    [112.0, 63.0, 38.5, 14.0]

    Notes
    -----
    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models". Sent: 3 P b (N-1)/N for FULL_SHARD (two gathers, one reduction), 2 for the others.
    """
    strategy = as_strategy(strategy)
    name = strategy.name
    if world < 1 or params <= 0 or units < 1:
        raise ValueError(f"params {params}, world {world}, units {units}: all are 1 or more")
    device = get_default_device() if device is None else device
    check_device(device)
    b = _core.as_dtype(dtype or _core.float32).itemsize
    n_optim = 1 if name == "NO_SHARD" else world
    n_grads = world if name not in ("NO_SHARD", "SHARD_OPTIM") else 1
    n_params = 1 if strategy.keeps_params else world
    published = params * (b / n_params + b / n_grads + 4 * states / n_optim)
    pooled = units if name == "SHARD_OPTIM" else min(_core.pooled_buffers, units)
    full = ceil(params * b / units)
    fulls = [(full, ceil(full / n_optim), i == 0 or n_params == 1) for i in range(units)]
    held = {
        "wire": _core.plan_fulls(fulls, n_optim, 1, device == "cuda"),
        "master": params * 4 / n_optim,
        "grad": params * 4 / n_optim,
        "state": params * 4 * states / n_optim,
        "reduce": params * b * (pooled / units),
    }
    passes = 3 if n_params > 1 else 2
    sent = passes * params * b * (world - 1) / world
    return Estimate(strategy=name, published=published, held=held, sent=sent)
