"""Estimate the memory, traffic, time and cost of training from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from fsdpc import _core
from fsdpc.display import html
from fsdpc.planning import memory_picture
from fsdpc.sharding.strategies import ShardingStrategy, as_strategy
from fsdpc.tensors.device import check_device, get_default_device


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """Bytes of memory per rank, excluding activations, and bytes sent per step.

    ``parts`` follows the arithmetic of the ZeRO paper: parameters and gradients in the compute
    dtype and fp32 states, each either whole or divided by the world size; ``published`` is their
    sum. ``mixed`` is the usual count in publications for mixed precision: fp32 gradients, and fp32
    masters sharded like the states. ``held`` is this engine's memory: the parameter buffer,
    masters, fp32 gradients and states, and reduce buffers. On CPUs there is one parameter buffer
    per host, counted here in full. On a GPU, the parameter buffer contains the rank's own slices
    and the units that are unsharded at the same time. ``sent`` is the bytes that a rank sends over
    links per step; ranks on the same host gather without copies.
    """

    strategy: str
    parts: dict[str, float]
    mixed: float
    held: dict[str, float]
    sent: float

    @property
    def published(self) -> float:
        """The sum of ``parts``."""
        return sum(self.parts.values())

    @property
    def held_total(self) -> float:
        """The sum of ``held``."""
        return sum(self.held.values())

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds a rank spends sending per step at this bandwidth, without overlap."""
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be above 0 bytes a second, got {bandwidth}")
        return self.sent / bandwidth

    def __repr__(self) -> str:
        return str(self)  # for the interactive prompt

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in self.held.items())
        return (
            f"{self.strategy}: published {self.published / 1e9:.4g} GB a rank; "
            f"held {self.held_total / 1e9:.4g} GB ({parts}); sent {self.sent / 1e9:.4g} GB a step"
        )

    def _repr_html_(self) -> str:
        """Return a picture of the memory, for display in notebooks."""
        more = [("published", int(self.published)), ("sent a step", int(self.sent))]
        held = [(name, int(n)) for name, n in self.held.items()]
        return memory_picture.picture(f"{self.strategy}: held by a rank", held, more)


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
    """Estimate a model's memory and traffic per rank from its number of parameters.

    Parameters
    ----------
    params : float
        Number of parameters, such as 7e9.
    world : int
        Number of ranks that shard them (one shard group).
    strategy : ShardingStrategy or str, default FULL_SHARD
    dtype : dtype, default float32
        Dtype of compute and communication.
    states : int, default 2
        Number of fp32 optimizer states per parameter (Adam: 2).
    units : int, default 32
        Number of equal units that the model is split into. It determines the size of reduce
        buffers and, on a GPU, how much is unsharded at the same time.
    device : {"cpu", "cuda"}, optional
        The ranks' device; by default this process's. This machine does not need a GPU.

    Examples
    --------
    >>> import fsdpc
    >>> [round(fsdpc.estimate(params=7e9, world=8, strategy=s).published / 1e9, 1)
    ...  for s in ("NO_SHARD", "SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD")]
    [112.0, 63.0, 38.5, 14.0]
    >>> half = [fsdpc.estimate(params=7e9, world=8, strategy=s, dtype="bfloat16")
    ...         for s in ("NO_SHARD", "FULL_SHARD")]
    >>> [each.published / 1e9 for each in half]
    [84.0, 10.5]
    >>> [half[0].mixed / 1e9, round(half[1].sent / 1e9), half[1].seconds(50e9)]
    [126.0, 37, 0.735]

    Notes
    -----
    fsdpc always keeps masters, states and gradient shards in fp32, so a run does not get down to
    the 84 and 10.5 GB of the bf16 lines. Without sharding it needs ``mixed`` and reduce buffers;
    sharded over CPUs, it needs one whole parameter buffer per host and a share of everything else.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models". The traffic is 3 P b (N-1)/N for FULL_SHARD (two all-gathers and a reduce-scatter), and
    2 P b (N-1)/N otherwise.
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
    parts = {
        "params": params * b / n_params,
        "grads": params * b / n_grads,
        "states": params * 4 * states / n_optim,
    }
    wide = parts["params"] + params * (4 / n_grads + 4 / n_optim) + parts["states"]
    pooled = units if name == "SHARD_OPTIM" else min(_core.pooled_buffers, units)
    full = ceil(params * b / units)
    unsharded = [(full, ceil(full / n_optim), i == 0 or n_params == 1) for i in range(units)]
    held = {
        "unsharded": _core.plan_unsharded(unsharded, n_optim, 1, device == "cuda"),
        "master": params * 4 / n_optim,
        "grad": params * 4 / n_optim,
        "state": params * 4 * states / n_optim,
        "reduce": params * b * (pooled / units),
    }
    passes = 3 if n_params > 1 else 2
    sent = passes * params * b * (world - 1) / world
    return Estimate(strategy=name, parts=parts, mixed=wide, held=held, sent=sent)


def estimate_activations(
    *, batch: int, seq: int, dim: int, layers: int, heads: int | None = None, dtype: Any = None
) -> float:
    """Estimate the bytes per rank that forward saves for backward, without recomputation.

    Parameters
    ----------
    batch, seq, dim, layers : int
        Sequences per rank, tokens per sequence, hidden width, blocks.
    heads : int, optional
        If given, the formula is that of Korthikanti et al. 2022 for GPT blocks, with
        attention matrices: layers x batch x seq x dim x (34 + 5 heads seq / dim) bytes at 2
        bytes per element. Otherwise it is a rule of thumb: ten tensors of (batch, seq, dim)
        per block.
    dtype : dtype, default bfloat16

    Examples
    --------
    >>> import fsdpc
    >>> at = {"batch": 4, "seq": 2048, "dim": 4096, "layers": 32}
    >>> kept = estimate_activations(**at)
    >>> ddp = fsdpc.estimate(params=7e9, world=1, dtype="bfloat16", strategy="NO_SHARD")
    >>> [round(x / 1e9, 1) for x in (*ddp.parts.values(), kept, ddp.published + kept)]
    [14.0, 14.0, 56.0, 21.5, 105.5]
    >>> round(estimate_activations(**at, heads=32) / 1e9, 1)
    122.4

    Notes
    -----
    fsdpc keeps no attention matrices. For an existing model, :func:`fsdpc.memory_plan` with a
    ``batch_shape`` returns the exact number of bytes, including logits.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformers".
    """
    _check_counts(batch=batch, seq=seq, dim=dim, layers=layers, heads=heads or 1)
    size = _core.as_dtype(dtype or _core.bfloat16).itemsize
    each = 10.0 if heads is None else (34 + 5 * heads * seq / dim) / 2
    return each * size * layers * batch * seq * dim


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingCost:
    """Duration and cost of a run: wall-clock ``hours``, ``rank_hours`` and ``cost``.

    Examples
    --------
    >>> import fsdpc
    >>> cost = fsdpc.training_cost(tokens=1e12, flops_per_token=6 * 7e9, ranks=1024, flops=150e12)
    >>> round(cost.hours)
    76
    """

    hours: float
    rank_hours: float
    cost: float

    def __repr__(self) -> str:
        return str(self)  # for the interactive prompt

    def __str__(self) -> str:
        return (
            f"{self.hours:,.1f} hours, {self.rank_hours:,.0f} of all ranks together, "
            f"{self.cost:,.0f} in money"
        )

    def _repr_html_(self) -> str:
        """Return a table, for display in notebooks."""
        return html.fields("cost of a run", {
            "hours": f"{self.hours:,.1f}", "hours of all ranks": f"{self.rank_hours:,.0f}",
            "money": f"{self.cost:,.0f}",
        })  # fmt: skip


def training_cost(
    *, tokens: float, flops_per_token: float, ranks: int, flops: float, price: float = 0.0
) -> TrainingCost:
    """Estimate the time and cost of training on a given number of tokens.

    Parameters
    ----------
    tokens : float
        Number of tokens in the whole run.
    flops_per_token : float
        FLOPs as counted by :func:`fsdpc.flops_per_token`.
    ranks : int
    flops : float
        FLOP/s achieved per rank: peak x MFU, by the same formula.
    price : float, default 0
        Price per rank-hour, in any currency.

    Examples
    --------
    >>> print(training_cost(tokens=1e12, flops_per_token=6 * 6.7e9, ranks=2048,
    ...                     flops=0.43 * 312e12, price=2))
    40.6 hours, 83,234 of all ranks together, 166,468 in money

    Notes
    -----
    For LLaMA-7B, Touvron et al. (2023) published 82,432 A100 hours for 1e12 tokens, which is 43 %
    of the A100's peak by the 6 N rule. Restarts and evaluation are not counted.
    """
    _check_counts(ranks=ranks)
    if not (tokens > 0 and flops_per_token > 0 and flops > 0 and price >= 0):
        raise ValueError(
            f"tokens {tokens}, flops_per_token {flops_per_token}, flops {flops} must be above 0, "
            f"price {price} at least 0"
        )
    rank_hours = tokens * flops_per_token / flops / 3600
    return TrainingCost(hours=rank_hours / ranks, rank_hours=rank_hours, cost=rank_hours * price)


def _check_counts(**counts: float) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
