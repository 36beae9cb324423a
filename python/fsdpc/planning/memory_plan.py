"""Compute how much memory a model needs on each rank, without building it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from fsdpc import _core, distributed
from fsdpc.display.svg import size
from fsdpc.distributed import group
from fsdpc.planning import memory_picture
from fsdpc.planning.snapshot import Snapshot
from fsdpc.sharding import rules
from fsdpc.sharding.fsdp_module import FSDPModule
from fsdpc.sharding.mesh import DeviceMesh
from fsdpc.sharding.offload import OffloadPolicy, planned
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.sharding.strategies import ShardingStrategy, as_strategy
from fsdpc.sharding.wrap import WrapPolicy, by_name, units_by
from fsdpc.tensors.device import DEVICES, check_device, get_default_device

#: Number of states per parameter that an optimizer keeps by default (SGD: 0 without momentum).
STATES = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0}


class HostGroup(NamedTuple):
    """The ranks in one operation: number of hosts, ranks per host, and such groups per host."""

    hosts: int
    lanes: int
    per_host: int


def groups_on_hosts(mesh: tuple[int, int], hosts: int, lanes: int) -> tuple[HostGroup, HostGroup]:
    """Return the shard group and the replicas, on hosts with ``lanes`` ranks each."""
    shard = mesh[1]
    if shard <= lanes and lanes % shard == 0:
        return HostGroup(1, shard, lanes // shard), HostGroup(hosts, lanes // shard, shard)
    if shard % lanes:
        raise ValueError(
            f"mesh {mesh} on hosts of {lanes} ranks: {shard} ranks that share shards must lie "
            "inside a host, or be whole hosts"
        )
    return HostGroup(shard // lanes, lanes, 1), HostGroup(mesh[0], 1, lanes)


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryPlan:
    """Bytes that the engine will use on a rank, by the categories of :func:`memory_stats`.

    ``wire`` is the gathered parameters in the compute dtype. On CPUs it is one copy per host,
    shared by the ranks of a shard group; all other categories are per rank. On ``device`` "cuda"
    the wire is per rank too: the rank's slices of all units, plus memory for the units that are
    unsharded at the same time. On CPUs on several ``hosts``, ``reduce`` includes memory for sums in
    transit between hosts; in deterministic mode over NCCL, it includes memory for the peers'
    contributions to a sum. ``staging`` is memory for transfers to and from a disk. ``file`` is on
    the disk and ``pinned`` in host memory next to a GPU; neither counts in the total.
    ``activation`` is the peak of forward and backward, if a batch was given. ``units`` lists the
    modules that are units. The plan prints as a table; in a notebook it shows a picture.

    Examples
    --------
    >>> import fsdpc
    >>> plan = fsdpc.memory_plan(fsdpc.nn.Linear(1024, 1024, bias=False), 4)
    >>> plan.total == plan.wire + plan.master + plan.grad + plan.state + plan.reduce
    True
    """

    device: str
    hosts: int = 1

    wire: int
    master: int
    grad: int
    state: int
    reduce: int
    staging: int = 0
    activation: int | None = None
    file: int = 0
    pinned: int = 0
    micro_sum: int = 0
    units: str = field(default="", compare=False)
    _by_device: dict[str, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)
    _mesh: tuple[int, int] = field(default=(1, 1), compare=False, repr=False)
    _micro_steps: int = field(default=0, compare=False, repr=False)  # 0: not deterministic
    _buffers: tuple[_Buffer, ...] = field(default=(), compare=False, repr=False)

    def for_device(self, device: str) -> MemoryPlan:
        """Return the plan for ranks on device "cpu" or "cuda", even if this machine has no GPU.

        If this machine has no GPU, the plan assumes one that maps memory in pieces of 2 MiB, as
        NVIDIA's do, and uses NCCL.

        Raises
        ------
        ValueError
            The device name is unknown.

        Examples
        --------
        >>> import fsdpc
        >>> layers = [fsdpc.nn.Linear(1024, 1024, bias=False) for _ in range(8)]
        >>> model = fsdpc.nn.Sequential(*layers)
        >>> plan = fsdpc.memory_plan(model, 64, plan={"*": {}})
        >>> [plan.for_device(device).wire // 2**20 for device in ("cpu", "cuda")]
        [32, 8]
        """
        check_device(device)
        held = dict(self._by_device[device])
        if device == "cpu":
            held["reduce"] += _room_bytes(self._buffers, self._mesh, self.hosts)
        held["grad"] += self._more_sums(device) * self.micro_sum
        return replace(self, device=device, **held)

    def for_hosts(self, hosts: int) -> MemoryPlan:
        """Return the plan for the same ranks, spread evenly over this many hosts.

        Raises
        ------
        ValueError
            The ranks, or a shard group, do not divide evenly over that many hosts.

        Examples
        --------
        >>> import fsdpc
        >>> plan = fsdpc.memory_plan(fsdpc.nn.Linear(1024, 1024, bias=False), 16)
        >>> [plan.for_hosts(n).reduce // 2**10 for n in (1, 2)]
        [4096, 4864]
        """
        ranks = math.prod(self._mesh)
        if hosts < 1 or ranks % hosts:
            raise ValueError(f"{ranks} ranks on {hosts} hosts: every host has as many")
        return replace(self, hosts=hosts).for_device(self.device)

    def for_micro_steps(self, n: int) -> MemoryPlan:
        """Return the plan for deterministic mode with n micro-steps per step, including its sums.

        A step that reads gradients between its micro-steps may keep one more sum.
        """
        return replace(self, _micro_steps=n).for_device(self.device)

    def _more_sums(self, device: str) -> int:
        """Return how many sums deterministic mode keeps in addition to the gradient shard."""
        replicate, shard = self._mesh
        ranks = shard if replicate == 1 else replicate  # of the reduction that produces the sums
        splits = self.hosts == 1 or device == "cuda"  # see can_split in csrc/engine/micro.c
        if not splits or (replicate > 1 and shard & (shard - 1)):
            ranks = 1
        return _most_sums(ranks, self._micro_steps) - 1

    @property
    def total(self) -> int:
        """The sum of all categories, on the rank for which the wire is counted."""
        engine = self.wire + self.master + self.grad + self.state + self.reduce + self.staging
        return engine + (self.activation or 0)

    def _parts(self) -> list[tuple[str, int]]:
        """Return the categories that add up to the total."""
        names = ["wire", "master", "grad", "state", "reduce"]
        names += ["staging"] if self.staging else []
        names += ["activation"] if self.activation is not None else []
        return [(name, getattr(self, name)) for name in names]

    def _beside(self) -> list[tuple[str, int]]:
        return [(name, getattr(self, name)) for name in ("file", "pinned") if getattr(self, name)]

    def _described(self) -> str:
        where = self.device if self.hosts == 1 else f"{self.device}, {self.hosts} hosts"
        return f"of {self.units}, on {where}"

    def __repr__(self) -> str:
        return str(self)  # for the interactive prompt

    def __str__(self) -> str:
        rows = [*self._parts(), ("total", self.total), *self._beside()]
        lines = [f"{name:11}{size(n):>14}" for name, n in rows]
        sharing = min(self._mesh[1], math.prod(self._mesh) // self.hosts)
        if self.device == "cpu" and sharing > 1:
            lines.append(f"{sharing} ranks of a host share one wire")
        return "\n".join([*lines, self._described()])

    def _repr_html_(self) -> str:
        """Return a picture, shown by notebooks."""
        title = f"memory of a rank, {self._described()}"
        return memory_picture.picture(title, self._parts(), self._beside())


@dataclass(frozen=True, kw_only=True)
class _UnitShape:
    specs: list[tuple[_core.dtype, tuple[int, ...], bool]]  # dtype, shape, frozen
    param_dtype: Any
    reduce_dtype: Any
    own_buffer: bool
    own_full: bool  # has its own memory even if others share slots
    offload: dict[str, _core.Offload | None]  # by device

    def sums(self, stage: str) -> list[_core.dtype]:
        """Return the dtypes in which a reduction, or a partial, is summed: one per flat group."""
        groups = dict.fromkeys(dtype for dtype, _, frozen in self.specs if not frozen)
        if stage == "reduce":
            return [self.reduce_dtype or self.param_dtype or dtype for dtype in groups]
        return [d if d == _core.float64 else _core.float32 for d in groups]

    def is_filled_in_place(self, device: str) -> bool:
        """Whether a single rank writes gradients directly to their final location."""
        offload = self.offload[device]
        sums = self.sums("reduce")
        return (
            len(sums) == 1
            and sums == self.sums("partial")
            and not (offload and offload[4])
            and not distributed.is_deterministic()
        )


def _most_sums(ranks: int, n: int) -> int:
    """Return how many sums n micro-steps keep at a time (see csrc/engine/micro.h).

    A run ends after some number of summed leaves; each set bit of that number is a kept sum.
    """
    ranks = 1 if ranks & (ranks - 1) == 0 else ranks
    most, leaves = 1, 0
    for end in range(ranks, n * ranks + 1, ranks):
        while leaves < end:
            left = 1 << (end - leaves).bit_length() - 1
            leaves += min(left, leaves & -leaves or left)
            most = max(most, leaves.bit_count())
    return most


class _Buffer(NamedTuple):
    """A reduce buffer, or a partial between the two stages of a mesh with replicas."""

    stage: str
    bytes: int
    dtypes: tuple[tuple[_core.dtype, ...], ...]  # per flat group, from all units


def memory_plan(
    model: Any,
    mesh: DeviceMesh | tuple[int, int] | int | None = None,
    batch_shape: Sequence[int] | None = None,
    *,
    strategy: ShardingStrategy | str | None = None,
    plan: WrapPolicy | dict[str, dict[str, Any]] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    optimizer: str | int = "adamw",
    offload_policy: OffloadPolicy | None = None,
    state_dtype: Any = None,
) -> MemoryPlan:
    """Compute the memory that the engine will use on each rank while a model trains.

    Parameters
    ----------
    model : Module
        If it is sharded, its own units and policies are used. Otherwise (including for deferred
        models), pass the ``plan`` and ``mp_policy`` that :func:`fully_shard` would get.
    mesh : DeviceMesh, (replicate, shard) or int, optional
        A mesh of any size; a number shards over that many ranks. By default the model's own mesh if
        it is sharded, otherwise this run's world.
    batch_shape : sequence of int, optional
        Shape of one rank's input: token ids (batch, tokens) for the models of :mod:`fsdpc.models`,
        otherwise floats. If given, forward and backward run on this rank only, on a device that
        computes nothing; the model's attributes are restored afterwards.
    strategy : ShardingStrategy or str, optional
        NO_SHARD turns a number of ranks into replicas; SHARD_OPTIM keeps full gradients.
    plan, mp_policy
        As in :func:`fully_shard`, for a model that is not sharded. Without a plan, each of the
        model's ``blocks()`` is a unit if it has that method.
    optimizer : str or int, default "adamw"
        The optimizer's name, or the number of states that it keeps per parameter.
    offload_policy : OffloadPolicy, optional
        As in :func:`fully_shard`, for a model that is not sharded.
    state_dtype : dtype, default float32
        Dtype of the optimizer's states.

    Returns
    -------
    MemoryPlan
        Equal to the run's own peaks, category by category, after the schedule is recorded and if no
        unit keeps gradients over several backwards (``no_sync``). A single rank may need more if
        gradients are accumulated or divided, or if a forward uses a unit twice. Masters of frozen
        parameters have their own memory until the first forward. The plan is for this process's
        device and, if its number of ranks equals this run's, for the run's hosts. For others, use
        :meth:`MemoryPlan.for_device` and :meth:`MemoryPlan.for_hosts`.

    Raises
    ------
    RuntimeError
        The model's forward keeps tensors that planning cannot restore.
    ValueError
        The mesh, the strategy or the batch is invalid.

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.deferred_init():
    ...     model = fsdpc.nn.Linear(1024, 1024, bias=False)
    >>> plan = fsdpc.memory_plan(model, 4)  # over four ranks, which need not be there
    >>> plan.master // 2**10, plan.state // 2**10  # KiB of this rank
    (1024, 2048)
    """
    if mesh is None and isinstance(model, FSDPModule):
        mesh = model._fsdpc_unit.mesh_shape
    replicate, shard = grid(mesh, strategy)
    keeps = strategy is not None and as_strategy(strategy) is ShardingStrategy.SHARD_OPTIM
    units = _sharded_units(model) if isinstance(model, FSDPModule) else []
    described = f"{len(units)} units, as sharded"
    if not units:
        described = "the units of the plan and the rest"
        if plan is None:
            blocks = model.blocks() if callable(getattr(model, "blocks", None)) else []
            described = "the whole model as one unit, as no plan was given"
            if blocks:
                described = f"{len(blocks)} blocks and the rest, as no plan was given"
                own = set(map(id, blocks))
                plan = lambda name, module: {} if id(module) in own else None  # noqa: E731
        policy = mp_policy or MixedPrecisionPolicy()
        units = _planned_units(model, plan, policy, strategy, offload_policy)
    n_states = STATES[optimizer] if isinstance(optimizer, str) else int(optimizer)
    kept_as = _core.float32 if state_dtype is None else _core.as_dtype(state_dtype)
    plans_by = {
        name: [
            _core.plan_unit(
                u.specs, shard, u.param_dtype, u.reduce_dtype, u.offload[name], kept_as
            )
            for u in units
        ]
        for name in DEVICES
    }
    plans = plans_by["cpu"]  # the device makes no difference here
    shards = {name: _shard_bytes(plans_by[name], units, n_states, name) for name in DEVICES}
    there = [bool(u.offload["cuda"] and u.offload["cuda"][:2] == ("host", True)) for u in units]
    fulls = [
        (one["wire"], 0 if away else one["published"], u.own_full)
        for u, one, away in zip(units, plans, there)
    ]
    if shard > 1:
        published = (one["published"] for one, away in zip(plans, there) if away)
        shards["cuda"]["pinned"] += sum(published)
    ahead = model._fsdpc_unit.prefetch if isinstance(model, FSDPModule) else 1
    two_stages = replicate > 1 and shard > 1
    world = group._world
    alone = replicate * shard == 1 and (
        world is None or world.size > 1 or world.transport == "self"
    )
    if not alone:  # frozen masters are pages of the wire
        shards["cpu"]["master"] -= sum(one["shared_master"] for one in plans)
    buffers = {
        name: _buffers(units, plans, keeps, two_stages, name if alone else None) for name in DEVICES
    }
    first = shard if shard > 1 else replicate  # ranks that contribute to a sum
    # In deterministic mode over NCCL, a rank receives its peers' contributions before it sums them.
    received = (first - 1) * max((one["contribution"] for one in plans), default=0)
    if two_stages:
        received += (replicate - 1) * max(one["partial_contribution"] for one in plans)
    by_device = {
        name: {
            **shards[name],
            "wire": _core.plan_fulls(fulls, shard, ahead, name == "cuda"),
            "reduce": sum(buffer.bytes for buffer in buffers[name])
            + (received if name == "cuda" and distributed.is_deterministic() else 0),
        }
        for name in DEVICES
    }
    if any(u.offload["cpu"] and u.offload["cpu"][1] for u in units):  # then the wire is a file
        by_device["cpu"]["file"] += by_device["cpu"]["wire"]
        by_device["cpu"]["wire"] = 0
    activation = None
    if batch_shape is not None:
        activation = _activation_bytes(model, tuple(batch_shape), mp_policy)
    here = get_default_device()
    is_here = world is not None and world.size == replicate * shard
    return MemoryPlan(
        device=here, hosts=world.hosts if world is not None and is_here else 1,
        micro_sum=sum(one["partial"] for one in plans), **by_device[here], activation=activation,
        units=described, _by_device=by_device, _mesh=(replicate, shard), _buffers=buffers["cpu"],
        _micro_steps=int(distributed.is_deterministic()),
    ).for_device(here)  # fmt: skip


def _shard_bytes(
    plans: list[dict[str, int]], units: list[_UnitShape], n_states: int, device: str
) -> dict[str, int]:
    """Return a rank's shard bytes by category; offloaded shards count as file or pinned."""
    found = dict.fromkeys(("master", "grad", "state", "file", "pinned", "staging"), 0)
    ring = {"file": 0, "pinned": 0}
    for one, unit in zip(plans, units):
        offload = unit.offload[device]
        where = "pinned" if offload and offload[0] == "host" else "file"
        for key, times in (("master", 1), ("grad", 1), ("state", n_states)):
            found[key] += times * one[key]
            found[where] += times * one[f"{key}_file"]
        ring[where] = max(ring[where], one["ring"])
    found["staging"] = ring["file"] if found["file"] else 0
    found["pinned"] += ring["pinned"]
    return found


def _buffers(
    units: list[_UnitShape],
    plans: list[dict[str, int]],
    keeps: bool,
    two_stages: bool,
    alone_on: str | None,
) -> tuple[_Buffer, ...]:
    """Return the buffers that csrc/engine/fill.c creates; ``alone_on``: a single rank's device."""
    found = []
    both = [(unit, one) for unit, one in zip(units, plans) if one["reduce"]]
    pools = [not (unit.own_buffer or keeps) for unit, _ in both]
    sharing = [each for each, it_pools in zip(both, pools) if it_pools]
    fills = [not (alone_on and unit.is_filled_in_place(alone_on)) for unit, _ in both]
    for stage in ("reduce", "partial") if two_stages else ("reduce",):
        for (unit, one), it_fills in zip(both, fills):
            if it_fills and (unit.own_buffer or keeps):
                found.append(_Buffer(stage, one[stage], tuple((d,) for d in unit.sums(stage))))
        shared = zip_longest(*(unit.sums(stage) for unit, _ in sharing))
        dtypes = tuple(tuple({d for d in each if d is not None}) for each in shared)
        largest = max((one[stage] for _, one in sharing), default=0)
        n = sum(map(operator.and_, fills, pools))
        found += [_Buffer(stage, largest, dtypes)] * min(_core.pooled_buffers, n)
    return tuple(found)


def _room_bytes(buffers: tuple[_Buffer, ...], mesh: tuple[int, int], hosts: int) -> int:
    """Return the bytes needed, besides the buffers, for sums in transit between hosts."""
    if hosts == 1:
        return 0
    shards, replicas = groups_on_hosts(mesh, hosts, math.prod(mesh) // hosts)
    total = 0
    for buffer in buffers:
        is_whole = buffer.stage == "partial" or mesh[1] == 1  # summed over replicas
        group = replicas if is_whole else shards
        if group.hosts > 1:
            where = buffer.bytes, group.hosts, group.lanes
            total += sum(
                max(_core.plan_rooms(is_whole, dtype, *where) for dtype in each)
                for each in buffer.dtypes
            )
    return total


def grid(mesh: Any, strategy: Any) -> tuple[int, int]:
    """Return (replicate, shard) for a mesh argument of :func:`memory_plan`."""
    if mesh is None:
        mesh = distributed.world_size()
    if isinstance(mesh, DeviceMesh):
        return mesh.shape if mesh.ndim == 2 else (1, mesh.shape[0])  # type: ignore[return-value]
    if isinstance(mesh, int):
        replicas = strategy is not None and as_strategy(strategy) is ShardingStrategy.NO_SHARD
        mesh = (mesh, 1) if replicas else (1, mesh)
    if len(mesh) != 2 or min(mesh) < 1:
        raise ValueError(f"a mesh is (replicate, shard) of at least 1 each, got {mesh}")
    return tuple(mesh)


def _specs(unit: _core.Unit) -> list[tuple[_core.dtype, tuple[int, ...], bool]]:
    return [
        (dtype, shape, group >= unit.trained_groups)
        for (_, dtype, shape), (group, *_) in zip(unit.params, _core.unit_places(unit), strict=True)
    ]


def _sharded_units(model: Any) -> list[_UnitShape]:
    return [
        _UnitShape(
            specs=_specs(unit),
            param_dtype=unit.param_dtype,
            reduce_dtype=unit.reduce_dtype,
            own_buffer=own or unit.keep_grads,
            own_full=own or unit.rank_dependent or not unit.reshard_after_forward,
            offload=_sharded_offload(unit.offload),
        )
        for unit, own in {**rules.enclosing(model), model._fsdpc_unit: True}.items()
    ]


def _sharded_offload(offload: _core.Offload | None) -> dict[str, _core.Offload | None]:
    """Return a sharded unit's offload by device; on a CPU, "host" is the same as "device"."""
    on_host = offload is not None and offload[0] == "host"
    return {name: None if on_host and name == "cpu" else offload for name in DEVICES}


def _planned_units(
    model: Any,
    plan: Any,
    policy: MixedPrecisionPolicy,
    strategy: Any,
    offload_policy: OffloadPolicy | None,
) -> list[_UnitShape]:
    stays = strategy is not None and as_strategy(strategy).keeps_params
    chosen: list[tuple[list[Any], dict[str, Any]]] = []
    if plan is not None:
        chosen = units_by(plan if callable(plan) else by_name(plan), [model])
    chosen.append(([model], {}))
    ids = {id(m) for (m,), _ in chosen}
    claimed: set[int] = set()
    units = []
    for (module,), options in chosen:
        own = options.get("mp_policy") or policy
        reshards = options.get("reshard_after_forward", not stays)
        params = [p for p in module.parameters() if id(p) not in claimed]
        claimed.update(map(id, params))
        alone = module is model or any(id(m) in ids for m in list(module.modules())[1:])
        units.append(
            _UnitShape(
                specs=[(p.dtype, p.shape, not p.requires_grad) for p in params],
                param_dtype=own.param_dtype,
                reduce_dtype=own.reduce_dtype,
                own_buffer=alone,
                own_full=alone or reshards is False,
                offload={
                    name: planned(options.get("offload_policy", offload_policy), name)
                    for name in DEVICES
                },
            )
        )
    return units


def _activation_bytes(
    model: Any, shape: tuple[int, ...], policy: MixedPrecisionPolicy | None
) -> int:
    """Return the peak activation bytes of forward and backward, from a dry run."""
    words = hasattr(getattr(model, "config", None), "vocab_size")
    params = list(model.parameters())
    dtypes = [_compute_dtype(p, policy) for p in params]

    def step() -> None:
        forward = type(model).forward
        if words:
            ids = np.zeros(shape, np.int64)
            forward(model, ids, ids).backward()
            return
        x = _core.empty(shape, dtype=dtypes[0] if dtypes else _core.float32)
        forward(model, x).sum().backward()

    def step_without_trace() -> None:
        with Snapshot(model):
            step()

    peak, left = _core.dry_run(params, dtypes, step_without_trace)
    check_left(model, left)
    return peak


def check_left(model: Any, left: int) -> None:
    """Raise if a forward on a device that computes nothing left tensors behind."""
    if left:
        raise RuntimeError(
            f"the forward of {type(model).__name__} keeps {left} bytes of tensors outside of the "
            "model (a global, a closure, a hook's list), where planning cannot take them back: "
            "they were not computed, so drop them, and keep such tensors in the model's attributes"
        )


def _compute_dtype(p: Any, policy: MixedPrecisionPolicy | None) -> _core.dtype:
    if p._unit is not None or policy is None or policy.param_dtype is None:
        return p.dtype  # a sharded parameter has its full parameter's dtype
    return policy.param_dtype
