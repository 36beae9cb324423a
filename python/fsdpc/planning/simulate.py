"""Simulate a step on hosts you do not have, from the engine's own schedule.

The engine runs a step of rank 0 on a device that computes nothing (played.py). The recorded
schedule contains every gather and reduction, with the points where it is posted and where the
program waits for it. A clock (clock.py) assigns a duration to every computation and to every
operation between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from textwrap import wrap
from typing import Any

from fsdpc import _core
from fsdpc.display.svg import size
from fsdpc.nn.module import Module
from fsdpc.optim.formats import state_bytes
from fsdpc.planning.clock import Clock, Network
from fsdpc.planning.memory_plan import STATES, MemoryPlan, groups_on_hosts, memory_plan
from fsdpc.planning.played import Played, play_step
from fsdpc.planning.timeline import Comparison, Timeline, of_clock
from fsdpc.sharding import rules
from fsdpc.sharding.compression import Compression
from fsdpc.sharding.offload import OffloadPolicy
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.sharding.strategies import ShardingStrategy, as_strategy
from fsdpc.sharding.wrap import WrapPolicy, by_name, check_names, units_by
from fsdpc.tensors.device import check_device, get_default_device


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options for :func:`simulate` besides the cluster.

    Parameters
    ----------
    strategy : ShardingStrategy or str, default FULL_SHARD
    mesh : (replicate, shard), optional
        By default the strategy's usual mesh; hybrid strategies shard within a host.
    reshard_after_forward, plan, mp_policy : optional
        As in :func:`fsdpc.fully_shard`; by default each of the model's ``blocks()`` is a unit.
    optimizer : str, default "adamw"
    accumulate : int, default 1
        Micro-steps per step; each of them reduces gradients.
    device : {"cpu", "cuda"}, optional
        By default this process's device. Ranks on CPUs share one copy of the parameters per host,
        and each byte is sent between hosts once. Ranks on GPUs have their own copies, and NCCL
        uses a ring of all ranks.
    local_bandwidth : float, default infinite
        Bytes per second that a rank sends within its host or, on CPUs, reads from other
        ranks.
    local_latency : float, default 0
        Seconds per hop within a host; only for GPUs.
    message : float, default 0
        Seconds that a rank spends on each message to another host; only for CPUs.
    memory_bandwidth : float, default infinite
        Bytes per second in the optimizer's pass over masters, gradients and states.
    state_dtype : dtype, "int8" or Int8, default float32
        Dtype of the optimizer's states.
    offload_policy : OffloadPolicy, optional
        The arrays to keep on a disk, as in :func:`fsdpc.fully_shard`; the folder is not used.
    compression : Compression, optional
        How parameters and gradients travel between hosts.
    disk_bandwidth : float, default infinite
        Bytes per second that a rank reads and writes in total while all ranks use the disk. The
        slower of disk and memory determines how long the optimizer's pass takes.
    core_bandwidth : float, default infinite
        Bytes per second that a CPU rank's core, instead of computing, sends to or receives from
        other hosts: the cost of copies and kernel protocols.
    overlap : bool, default True
        Whether communication overlaps computation.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.SimulateOptions(strategy="SHARD_GRAD_OP").strategy
    'SHARD_GRAD_OP'
    """

    strategy: ShardingStrategy | str = "FULL_SHARD"
    mesh: tuple[int, int] | None = None
    reshard_after_forward: bool | int | None = None
    plan: WrapPolicy | dict[str, dict[str, Any]] | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    optimizer: str = "adamw"
    accumulate: int = 1
    device: str | None = None
    local_bandwidth: float = math.inf
    local_latency: float = 0.0
    message: float = 0.0
    memory_bandwidth: float = math.inf
    state_dtype: Any = None
    offload_policy: OffloadPolicy | None = None
    compression: Compression | None = None
    disk_bandwidth: float = math.inf
    core_bandwidth: float = math.inf
    overlap: bool = True

    def __post_init__(self) -> None:
        known = [name for name in STATES if name != "adafactor"]  # which makes several passes
        if self.optimizer not in known:
            raise ValueError(f"optimizer '{self.optimizer}': one of {', '.join(known)}")
        if self.offload_policy is not None and self.offload_policy.activations == "disk":
            raise NotImplementedError(
                "simulate() with activations on a disk: it does not know when they move; "
                "memory_plan() counts their bytes"
            )
        _check_positive(
            accumulate=self.accumulate,
            local_bandwidth=self.local_bandwidth,
            memory_bandwidth=self.memory_bandwidth,
            disk_bandwidth=self.disk_bandwidth,
            core_bandwidth=self.core_bandwidth,
        )
        _check_not_negative(local_latency=self.local_latency, message=self.message)


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """The result of :func:`simulate`: seconds, bytes, and memory per rank.

    ``exposed`` is the seconds that a rank waits without computing: for gathers, for reductions, and
    for other ranks to begin an epoch or to agree. ``sent_between`` and ``sent_inside`` are the
    bytes that one host's ranks send to other hosts and to each other (on CPUs: read from each
    other). ``messages`` counts one rank's messages to other hosts or, on GPUs, its ring steps.
    ``flops`` counts one rank's matrix products, including those that activation checkpointing
    recomputes. ``memory`` is the :func:`fsdpc.memory_plan`, whose ``unsharded`` is shared by
    ``sharing_ranks`` ranks on a host. ``padding`` is the padding's memory as a fraction of the
    parameters'.

    Examples
    --------
    >>> import fsdpc
    >>> found = fsdpc.simulate(fsdpc.nn.Linear(1024, 1024), (8, 1024), hosts=2, ranks_per_host=1,
    ...                        bandwidth=1e9, latency=1e-5, flops=1e11)
    >>> found.step >= found.compute + max(found.exposed.values())
    True
    """

    title: str
    step: float
    compute: float
    exposed: dict[str, float]
    sent_between: float
    sent_inside: float
    messages: int
    flops: int
    memory: MemoryPlan
    sharing_ranks: int
    padding: float
    record: Played = field(repr=False)
    timeline: Timeline = field(repr=False)

    def beside(self, other: Simulation, limit: float | None = None) -> Comparison:
        """Compare two steps on the same axes, with differences in time and bytes.

        Parameters
        ----------
        other : Simulation
        limit : float, optional
            Bytes per rank, drawn as a line.

        Raises
        ------
        ValueError
            The limit is not above 0.
        """
        self.timeline.with_limit(limit)
        return Comparison(a=self, b=other, limit=limit)

    def _repr_html_(self) -> str:
        """Return a picture of the step, for display in notebooks."""
        return self.timeline._repr_html_()

    @property
    def exposed_total(self) -> float:
        """Total seconds that a rank waits without computing."""
        return sum(self.exposed.values())

    def __repr__(self) -> str:
        return str(self)  # for the interactive prompt

    def __str__(self) -> str:
        waits = ", ".join(f"{name} {1e3 * s:.4g}" for name, s in self.exposed.items())
        plan, shared = self.memory, self.sharing_ranks > 1
        parts = {"master": plan.master, "grad": plan.grad, "state": plan.state,
                 "reduce": plan.reduce, "activation": plan.activation or 0}  # fmt: skip
        parts = parts if shared else {"unsharded": plan.unsharded, **parts}
        parts |= {"staging": plan.staging} if plan.staging else {}
        elsewhere = {"on a disk": plan.file, "pinned": plan.pinned}
        lines = {
            "step": f"{1e3 * self.step:.4g} ms: compute {1e3 * self.compute:.4g}, exposed "
            f"{1e3 * self.exposed_total:.4g} ({waits})",
            "sent": f"{size(self.sent_between)} a host to others in {self.messages:,} messages a "
            f"rank, {size(self.sent_inside)} inside it",
            "memory": f"{size(sum(parts.values()))} a rank: "
            + ", ".join(f"{name} {size(n)}" for name, n in parts.items())
            + (f"; unsharded {size(plan.unsharded)}, "
               f"which {self.sharing_ranks} ranks of a host share" if shared else "")
            + "".join(f"; {name} {size(n)}" for name, n in elsewhere.items() if n),
            "padding": f"{100 * self.padding:.3g} % of the parameters",
            "products": f"{self.flops / 1e12:.4g} TFLOP a rank",
        }  # fmt: skip
        text = [wrap(f"{name:10}{value}", 80, subsequent_indent=" " * 10, break_on_hyphens=False)
                for name, value in lines.items()]  # fmt: skip
        title = wrap(self.title, 80, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([*title, *(line for each in text for line in each)])


def simulate(
    model: Any,
    batch_shape: Sequence[int] | None = None,
    *,
    hosts: int,
    ranks_per_host: int,
    bandwidth: float,
    latency: float,
    flops: float,
    **options: Any,
) -> Simulation:
    """Simulate a training step on any cluster, real or planned.

    Parameters
    ----------
    model : Module
        An unsharded model; it may be deferred (:class:`fsdpc.deferred_init`), so any size is
        possible. It is not changed.
    batch_shape : sequence of int, optional
        Shape of one rank's input: token ids (batch, tokens) for the models of :mod:`fsdpc.models`,
        otherwise floats. By default one sequence of the model's ``max_seq`` tokens.
    hosts, ranks_per_host : int
    bandwidth : float
        Bytes per second that a host can send to other hosts while receiving at the same rate.
    latency : float
        Seconds until a message's first byte reaches another host.
    flops : float
        Floating point operations per second that a rank achieves in the model's matrix products.
    **options
        Fields of :class:`SimulateOptions`.

    Returns
    -------
    Simulation

    Raises
    ------
    NotImplementedError
        Replicas compress their sums, whose times are unknown.
    RuntimeError
        The model's forward keeps tensors outside the model.
    TypeError
        Unknown option.
    ValueError
        A cluster parameter is out of range, the mesh does not match the ranks, or the model is
        sharded.

    Notes
    -----
    Any rank may call it independently. Only matrix products and attention are counted as
    computation; the rate ``flops`` must account for everything else. Operations that use a link at
    the same time share it evenly.

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.deferred_init():
    ...     model = fsdpc.models.Llama(fsdpc.models.preset("7B"))
    >>> found = fsdpc.simulate(model, (1, 4096), hosts=2, ranks_per_host=8, bandwidth=400e9,
    ...                        latency=5e-6, flops=400e12, device="cuda")
    >>> found.step > found.compute
    True
    """
    known = {each.name for each in fields(SimulateOptions)}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"simulate() has no option '{unknown[0]}'; there are {sorted(known)}")
    o = SimulateOptions(**options)
    _check_positive(hosts=hosts, ranks_per_host=ranks_per_host, bandwidth=bandwidth, flops=flops)
    _check_not_negative(latency=latency)
    if o.compression is not None and o.compression.replicas is not None:
        raise NotImplementedError(
            f"compression={str(o.compression)!r}: simulate() has no model of what replicas compute "
            "for it; memory_plan() has one of its memory"
        )
    if not isinstance(model, Module) or any(map(rules.is_sharded, model.modules())):
        what = "sharded already" if isinstance(model, Module) else "no fsdpc.nn.Module"
        raise ValueError(f"{type(model).__name__} is {what}: simulate() shards a model by itself")
    device = o.device or get_default_device()
    check_device(device)
    strategy = as_strategy(o.strategy)
    mesh = _mesh(o, strategy, hosts, ranks_per_host)
    groups = groups_on_hosts(mesh, hosts, ranks_per_host)
    rules.check_reshard(o.reshard_after_forward, mesh[1])
    shape = _batch_shape(model, batch_shape)
    policy, units = _units(model, o)
    record = play_step(
        model, shape, mesh,
        {"strategy": strategy, "reshard_after_forward": o.reshard_after_forward, "plan": policy,
         "mp_policy": o.mp_policy, "compression": o.compression},
        optimizer=o.optimizer, accumulate=o.accumulate, orders=device == "cuda",
    )  # fmt: skip
    planned = partial(memory_plan, model, mesh, strategy=strategy, plan=policy,
                      mp_policy=o.mp_policy, optimizer=o.optimizer,
                      state_dtype=o.state_dtype, compression=o.compression)  # fmt: skip
    whole = planned().for_device(device)
    memory = whole
    if o.offload_policy is not None:
        memory = planned(offload_policy=o.offload_policy).for_device(device)
    memory = memory.for_hosts(hosts)
    network = Network(bandwidth=bandwidth, latency=latency, options=o, device=device,
                  messages=memory._messages)  # fmt: skip
    clock = Clock(record, groups, network, flops)
    clock.play()
    trained = (p for p in model.parameters() if p.requires_grad)  # gradients are fp32 or wider
    held = sum(math.prod(p.shape) * max(p.dtype.itemsize, 4) for p in trained)
    element = (o.mp_policy and o.mp_policy.param_dtype or _core.float32).itemsize
    state = state_bytes(o.state_dtype)
    numel, states = whole.grad / 4, 2 * state * STATES[o.optimizer]  # read and written
    optimizer = max(
        numel * (12 + states + element) / o.memory_bandwidth,
        numel * _disk_bytes(o.offload_policy, states) / o.disk_bandwidth,
    )
    ranks = f"{hosts} host{'s' * (hosts > 1)} x {ranks_per_host} rank{'s' * (ranks_per_host > 1)}"
    title = (
        f"{strategy.name} on {ranks} ({device}), mesh {mesh[0]} x {mesh[1]}, "
        f"{units}, batch {'x'.join(map(str, shape))} a rank"
    )
    memory = replace(memory, activation=record.memory["activation"])
    sharing_ranks = groups[0].local_size if device == "cpu" else 1
    return Simulation(
        title=title,
        step=clock.now + optimizer,
        compute=record.flops / flops + optimizer,
        exposed=clock.exposed,
        sent_between=clock.sent.between,
        sent_inside=clock.sent.inside,
        messages=clock.sent.messages,
        flops=record.flops,
        memory=memory,
        sharing_ranks=sharing_ranks,
        padding=whole.grad * mesh[1] / held - 1 if held else 0.0,
        record=record,
        timeline=of_clock(clock, clock.now + optimizer, memory, sharing_ranks, title),
    )


# ---- from the options to a plan ----


def _disk_bytes(policy: OffloadPolicy | None, states: float) -> float:
    """Return the disk bytes per shard element and step, excluding page cache traffic."""
    each = {"masters": 8, "optimizer": states, "gradients": 8, "params": 0}
    return policy.fraction * sum(each[name] for name in policy.on_disk) if policy else 0.0


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        whole = name in ("hosts", "ranks_per_host", "accumulate")
        if not value > 0 or (whole and (value != int(value) or value < 1)):
            wanted = "a whole number of at least 1" if whole else "above 0"
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")


def _mesh(
    o: SimulateOptions, strategy: ShardingStrategy, hosts: int, ranks_per_host: int
) -> tuple[int, int]:
    world = hosts * ranks_per_host
    usual = (1, world)
    if strategy is ShardingStrategy.NO_SHARD:
        usual = (world, 1)
    elif strategy.name.startswith("HYBRID"):
        usual = (hosts, ranks_per_host)
    mesh = usual if o.mesh is None else tuple(o.mesh)
    if len(mesh) != 2 or min(mesh) < 1 or math.prod(mesh) != world:
        raise ValueError(
            f"mesh {mesh} is not (replicate, shard) of {hosts} x {ranks_per_host} = {world} ranks"
        )
    return mesh  # type: ignore[return-value]


def _batch_shape(model: Any, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is None:
        if not hasattr(getattr(model, "config", None), "max_seq"):
            raise ValueError(f"give batch_shape, that of a rank's input of {type(model).__name__}")
        shape = (1, model.config.max_seq)
    if not shape or min(shape) < 1:
        raise ValueError(f"batch_shape must be of numbers from 1 on, got {tuple(shape)}")
    return tuple(int(n) for n in shape)


def _units(model: Any, o: SimulateOptions) -> tuple[WrapPolicy, str]:
    """Return the units' modules, calling a possibly stateful policy only once per module."""
    own = {} if o.reshard_after_forward is None else {
        "reshard_after_forward": o.reshard_after_forward
    }  # fmt: skip
    chosen: dict[int, dict[str, Any]] = {}
    if o.plan is None:
        chosen = {id(b): own for b in (model.blocks() if hasattr(model, "blocks") else [])}
    else:
        if not callable(o.plan):
            check_names(o.plan, [model])
        policy = o.plan if callable(o.plan) else by_name(o.plan)
        chosen = {id(m): {**own, **found} for (m,), found in units_by(policy, [model])}
    return lambda _, module: chosen.get(id(module)), f"{len(chosen)} units and the rest"
