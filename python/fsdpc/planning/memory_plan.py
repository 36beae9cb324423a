"""Compute how much memory a model needs on each rank, without building it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from fsdpc import _core, distributed
from fsdpc.display.svg import size
from fsdpc.distributed import group
from fsdpc.optim.formats import as_format
from fsdpc.optim.matrix import takes_muon
from fsdpc.planning import memory_picture
from fsdpc.planning.snapshot import Snapshot
from fsdpc.sharding import rules, saved
from fsdpc.sharding.compression import Compression, codecs
from fsdpc.sharding.fsdp_module import FSDPModule
from fsdpc.sharding.mesh import DeviceMesh
from fsdpc.sharding.offload import OffloadPolicy, planned
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.sharding.strategies import ShardingStrategy, as_strategy
from fsdpc.sharding.wrap import WrapPolicy, by_name, units_by
from fsdpc.tensors.device import DEVICES, check_device, get_default_device

#: Optimizers that step matrices inside blocks; AdamW steps the other parameters.
_OF_MATRICES = ("muon", "orthogonalsgd")
#: Number of states per parameter that the others keep by default (SGD: 0 without momentum,
#: Adafactor: 1 for vectors only).
STATES = {
    name.lower(): states
    for name, (_, states) in _core.optimizers().items()
    if name.lower() not in (*_OF_MATRICES, "ema", "outer")
}


class HostGroup(NamedTuple):
    """The ranks of an operation: hosts, ranks per host, and the number of such groups per host."""

    hosts: int
    local_size: int
    per_host: int


def groups_on_hosts(
    mesh: tuple[int, int], hosts: int, local_size: int
) -> tuple[HostGroup, HostGroup]:
    """Return the shard group and the replica group, on hosts with ``local_size`` ranks each."""
    shard = mesh[1]
    if shard <= local_size and local_size % shard == 0:
        columns = local_size // shard
        return HostGroup(1, shard, columns), HostGroup(hosts, columns, shard)
    if shard % local_size:
        raise ValueError(
            f"mesh {mesh} on hosts of {local_size} ranks: {shard} ranks that share shards must lie "
            "inside a host, or be whole hosts"
        )
    return HostGroup(shard // local_size, local_size, 1), HostGroup(mesh[0], 1, local_size)


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryPlan:
    """The bytes that the engine will use on a rank, by :func:`memory_stats` category.

    ``unsharded`` is the gathered parameters in the compute dtype. On CPUs there is one copy per
    host, which the ranks of a shard group share; all other categories are per rank. On ``device``
    "cuda", the parameter buffer is per rank too: the rank's slices of all units, plus memory for
    the units unsharded at the same time. On CPUs on several ``hosts``, ``reduce`` includes sums in
    transit between hosts; in deterministic mode over NCCL, it includes the peers' contributions to
    a sum. ``staging`` is memory for transfers to and from a disk, and for the work of Muon and
    Adafactor. ``file`` is on the disk and ``pinned`` in host memory next to a GPU; neither counts
    in the total. ``activation`` is the peak of forward and backward, if a batch was given.
    ``units`` lists the modules that are units. The plan prints as a table and is displayed as a
    picture in notebooks.

    Examples
    --------
    >>> import fsdpc
    >>> plan = fsdpc.memory_plan(fsdpc.nn.Linear(1024, 1024, bias=False), 4)
    >>> plan.total == plan.unsharded + plan.master + plan.grad + plan.state + plan.reduce
    True
    """

    device: str
    hosts: int = 1

    unsharded: int
    master: int
    grad: int
    state: int
    reduce: int
    staging: int = 0
    activation: int | None = None
    file: int = 0
    pinned: int = 0
    units: str = field(default="", compare=False)
    _question: _Question = field(compare=False, repr=False)
    _micro_steps: int = field(default=0, compare=False, repr=False)  # 0: not deterministic
    _messages: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def for_device(self, device: str) -> MemoryPlan:
        """Return the plan for ranks on device "cpu" or "cuda", even if this machine has no GPU.

        If this machine has no GPU, the plan assumes one that uses NCCL and maps memory in 2 MiB
        pieces, as NVIDIA GPUs do. Activations are those that were measured: a GPU holds more of a
        head's logits at a time (``functional.linear_cross_entropy``).

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
        >>> [plan.for_device(device).unsharded // 2**20 for device in ("cpu", "cuda")]
        [32, 8]
        """
        check_device(device)
        answer = self._question.ask(device, self.hosts, self._micro_steps)
        return replace(self, device=device, **answer)

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
        ranks = math.prod(self._question.mesh)
        if hosts < 1 or ranks % hosts:
            raise ValueError(f"{ranks} ranks on {hosts} hosts: every host has as many")
        return replace(self, hosts=hosts).for_device(self.device)

    def for_micro_steps(self, n: int) -> MemoryPlan:
        """Return the plan for deterministic mode with n micro-steps, including the sums it keeps.

        A step that reads gradients between micro-steps may keep one more sum than this.
        """
        return replace(self, _micro_steps=n).for_device(self.device)

    @property
    def total(self) -> int:
        """The sum of all categories, on the rank that is charged for the parameter buffer."""
        engine = self.unsharded + self.master + self.grad + self.state + self.reduce + self.staging
        return engine + (self.activation or 0)

    def _parts(self) -> list[tuple[str, int]]:
        """Return the categories that add up to the total."""
        names = ["unsharded", "master", "grad", "state", "reduce"]
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
        mesh = self._question.mesh
        sharing = min(mesh[1], math.prod(mesh) // self.hosts)
        if self.device == "cpu" and sharing > 1:
            lines.append(f"{sharing} ranks of a host share one parameter buffer")
        return "\n".join([*lines, self._described()])

    def _repr_html_(self) -> str:
        """Return a picture, for display in notebooks."""
        title = f"memory of a rank, {self._described()}"
        return memory_picture.picture(title, self._parts(), self._beside())


class _PlannedUnit(NamedTuple):
    """A unit as the engine plans it, except that ``offload`` has one entry per device."""

    #: dtype, shape, frozen, and "matrix" or "factored" if such a rule steps it
    specs: list[tuple[_core.dtype, tuple[int, ...], bool, str]]
    param_dtype: Any
    reduce_dtype: Any
    offload: dict[str, _core.Offload | None]
    gather_codec: str
    reduce_codec: str
    error_feedback: bool
    low_rank: Any
    encloses: bool  # or is the root
    keep_grads: bool
    rank_dependent: bool
    reshard_after_forward: bool


class _Question(NamedTuple):
    """The engine's inputs for a plan, kept to compute it for other devices and host counts."""

    units: list[_PlannedUnit]
    mesh: tuple[int, int]
    single: bool  # one rank, which needs no buffer that others read
    prefetch: int
    n_states: int
    state_format: tuple[_core.dtype, int]
    ema: bool
    in_backward: bool
    outer: str | None  # the form of outer steps' differences; None: there are none
    saved: dict[str, int]  # for tensors that leave until backward

    def ask(self, device: str, hosts: int, micro_steps: int) -> dict[str, Any]:
        """Return the fields of a plan: bytes by category, and messages between hosts."""
        is_gpu = device == "cuda"
        hosts = 1 if is_gpu else hosts  # NCCL keeps no sums in transit
        groups = groups_on_hosts(self.mesh, hosts, math.prod(self.mesh) // hosts)
        mesh = self.mesh if self.outer is None else (1, self.mesh[1])  # that shares gradients

        def rows_of(units: Any, n_states: int, state_format: tuple[_core.dtype, int]) -> list[Any]:
            return _core.plan_root(
                units, mesh, tuple(group[:2] for group in groups), is_gpu, self.single,
                self.prefetch, n_states, state_format, micro_steps, self.outer,
            )  # fmt: skip

        units = [unit._replace(offload=unit.offload[device]) for unit in self.units]
        rows = rows_of(units, self.n_states, self.state_format)
        # More states in their parameters' dtypes, whichever rules step these.
        if more := self.ema + 2 * (self.outer is not None):
            units = [unit._replace(specs=[spec[:3] for spec in unit.specs]) for unit in units]
            rows += [row for row in rows_of(units, more, as_format(None)) if row[0] == "states"]
        found = dict.fromkeys(_CATEGORIES, 0)
        found.update(self.saved)
        if self.in_backward and min(mesh) > 1:
            raise NotImplementedError(f"step_in_backward with replicas of shards: {self.mesh}")
        if self.in_backward:
            of_units = [rows_of([unit], 0, as_format(None)) for unit in units]
            each = [sum(r[2] * r[3] for r in of_unit if r[0] == _GRADS) for of_unit in of_units]
            found["grad"] = sum(sorted(each)[-2:])
            rows = [row for row in rows if row[0] != _GRADS]
        messages: dict[str, int] = {}
        for name, kind, n_bytes, count, where in rows:
            if where == "message":
                messages[name] = n_bytes
            else:
                found[kind if where == "memory" else where] += n_bytes * count
        return {**found, "_messages": messages}


_GRADS = "gradients"  # the engine's name of these rows
_CATEGORIES = ("unsharded", "master", "grad", "state", "reduce", "staging", "file", "pinned")


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
    compression: Compression | None = None,
    state_dtype: Any = None,
    ema: bool = False,
    step_in_backward: bool = False,
    outer: bool | str = False,
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
        The optimizer's name, or the number of states that it keeps per parameter. "muon" steps
        matrices inside the model's ``blocks()``, as :func:`fsdpc.optim.muon_groups` says.
    offload_policy : OffloadPolicy, optional
        As in :func:`fully_shard`, for a model that is not sharded.
    compression : Compression, optional
        The same. Its codes in transit between hosts are in ``staging``, as the most that may be in
        flight; a run may need less.
    state_dtype : dtype, "int8" or Int8, default float32
        Of the optimizer's states.
    ema : bool, default False
        Include the averages of an :class:`fsdpc.EMA`, in ``state``.
    step_in_backward : bool, default False
        The optimizer steps units inside backward, so gradients need memory for the two largest
        units. On a single rank, units inside others need more: one for each level.
    outer : bool or str, default False
        Replicas train apart, with the outer steps of an :class:`fsdpc.Outer` with momentum: its
        states are in ``state``, and what it sums in ``reduce``. A text is its ``compression``. True
        for a model that has one.

    Returns
    -------
    MemoryPlan
        Equal to the run's own peaks, category by category, after the schedule is recorded and if no
        unit keeps gradients over several backwards (``no_sync``). A head's unit that is not the
        last to run may need its weight's gradient more. A single rank may need more if
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
        mesh = rules.mesh_shape_of(model)
    replicate, shard = grid(mesh, strategy)
    if not outer and isinstance(model, FSDPModule):
        outer = model._fsdpc_unit.apart
    rules_of = _rules_of(model, optimizer)
    if rules_of and as_format(state_dtype)[0] is not _core.float32:
        raise ValueError(f"state_dtype={state_dtype!r}: {optimizer}'s states are float32")
    units = _sharded_units(model, rules_of) if isinstance(model, FSDPModule) else []
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
        units = _planned_units(model, plan, policy, strategy, offload_policy, compression,
                               rules_of)  # fmt: skip
    if strategy is not None and as_strategy(strategy) is ShardingStrategy.SHARD_OPTIM:
        units = [unit._replace(keep_grads=True) for unit in units]
    world = group._world
    single = replicate * shard == 1 and (
        world is None or world.size > 1 or world.transport == "self"
    )
    activation, saved_bytes = None, dict[str, int]()
    if batch_shape is not None:
        leaves = _leaving(model, plan, offload_policy)
        with saved.planning(leaves):
            activation, _ = measure_step(model, tuple(batch_shape), mp_policy, single)
        saved_bytes = saved.take_planned()
    question = _Question(
        units=units,
        mesh=(replicate, shard),
        single=single,
        prefetch=model._fsdpc_unit.prefetch if isinstance(model, FSDPModule) else 1,
        n_states=(
            STATES["adamw" if optimizer in _OF_MATRICES else optimizer]
            if isinstance(optimizer, str) else int(optimizer)
        ),
        state_format=as_format(state_dtype),
        ema=ema,
        in_backward=step_in_backward,
        outer=(outer if isinstance(outer, str) else "exact") if outer else None,
        saved=saved_bytes,
    )
    here = get_default_device()
    hosts = world.hosts if world is not None and world.size == replicate * shard else 1
    micro_steps = int(distributed.is_deterministic())
    return MemoryPlan(
        device=here, hosts=hosts, activation=activation, units=described, _question=question,
        _micro_steps=micro_steps, **question.ask(here, hosts, micro_steps),
    )  # fmt: skip


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


def _specs(
    unit: _core.Unit, rules_of: dict[int, str]
) -> list[tuple[_core.dtype, tuple[int, ...], bool, str]]:
    places = zip(unit.params, _core.unit_places(unit), strict=True)
    return [
        (dtype, shape, group >= unit.trained_groups, rules_of.get(i, ""))
        for i, ((_, dtype, shape), (group, *_)) in enumerate(places)
    ]


def _rules_of(model: Any, optimizer: str | int) -> dict[int, str]:
    """Return, by ``id()`` of a parameter, the kind of rule by which it is stepped if not "".

    The engine plans other memory for these.
    """
    if optimizer == "adafactor":
        return {id(p): "factored" for p in model.parameters()}
    return dict.fromkeys(takes_muon(model), "matrix") if optimizer in _OF_MATRICES else {}


def _sharded_units(model: Any, rules_of: dict[int, str]) -> list[_PlannedUnit]:
    found: dict[_core.Unit, dict[int, str]] = {}
    for p in model.parameters():
        if id(p) in rules_of and p._unit is not None:
            found.setdefault(p._unit, {})[p._index] = rules_of[id(p)]
    return [
        _PlannedUnit(
            specs=_specs(unit, found.get(unit, {})),
            param_dtype=unit.param_dtype,
            reduce_dtype=unit.reduce_dtype,
            offload=_sharded_offload(unit.offload),
            gather_codec=unit.gather_codec,
            reduce_codec=unit.reduce_codec,
            error_feedback=unit.error_feedback,
            low_rank=unit.low_rank,
            encloses=encloses,
            keep_grads=unit.keep_grads,
            rank_dependent=unit.rank_dependent,
            reshard_after_forward=unit.reshard_after_forward,
        )
        for unit, encloses in {**rules.enclosing(model), model._fsdpc_unit: True}.items()
    ]


def _sharded_offload(offload: _core.Offload | None) -> dict[str, _core.Offload | None]:
    """Return a sharded unit's offload policy per device; on a CPU, "host" means "device"."""
    on_host = offload is not None and offload[0] == "host"
    return {name: None if on_host and name == "cpu" else offload for name in DEVICES}


def _planned_units(
    model: Any,
    plan: Any,
    policy: MixedPrecisionPolicy,
    strategy: Any,
    offload_policy: OffloadPolicy | None,
    compression: Compression | None,
    rules_of: dict[int, str],
) -> list[_PlannedUnit]:
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
        policies = options.get("offload_policy", offload_policy)
        compressed = options.get("compression", compression)
        units.append(
            _PlannedUnit(
                specs=[
                    (p.dtype, p.shape, not p.requires_grad, rules_of.get(id(p), ""))
                    for p in params
                ],
                param_dtype=own.param_dtype,
                reduce_dtype=own.reduce_dtype,
                offload={name: planned(policies, name) for name in DEVICES},
                **codecs(compressed),
                encloses=module is model or any(id(m) in ids for m in list(module.modules())[1:]),
                keep_grads=False,
                rank_dependent=False,
                reshard_after_forward=reshards is not False,
            )
        )
    return units


def _leaving(model: Any, plan: Any, policy: OffloadPolicy | None) -> dict[Any, OffloadPolicy]:
    """Return the modules of a plan whose saved tensors leave: those that enclose no other."""
    if isinstance(model, FSDPModule):
        return {}
    find = plan if plan is None or callable(plan) else by_name(plan)
    chosen = units_by(find, [model]) if find is not None else []
    modules = {m: options.get("offload_policy", policy) for ms, options in chosen for m in ms}
    moving = {m: own for m, own in modules.items() if saved.leaves(own)}
    inner = {m: own for m, own in moving.items() if not {*list(m.modules())[1:]} & set(moving)}
    if saved.leaves(policy) and not inner:
        saved.refuse_outer("", model)
    return inner


def measure_step(
    model: Any,
    shape: tuple[int, ...],
    policy: MixedPrecisionPolicy | None,
    single: bool | None = None,
) -> tuple[int, int]:
    """Measure a forward and backward in a dry run; return peak activation bytes and FLOPs.

    Unless it is for a ``single`` rank (by default: if this run has one), reduce buffers lend memory
    to gradients that a forward computes.
    """
    if single is None:
        single = group._world is None or group._world.size == 1
    words = hasattr(getattr(model, "config", None), "vocab_size")
    params = list(model.parameters())
    dtypes = [_compute_dtype(p, policy) for p in params]
    lent = [None if single else _lent_dtype(p, policy) for p in params]

    def step() -> None:
        forward = type(model).forward
        if words:
            ids = np.zeros(shape, np.int64)
            forward(model, ids, ids).backward()
            return
        dtype = next((d for d in dtypes if d.is_floating_point), _core.float32)
        x = _core.empty(shape, dtype=dtype)
        forward(model, x).sum().backward()

    def step_without_trace() -> None:
        with Snapshot(model):
            step()

    saved.take_planned()  # of a dry run that failed, or of a search
    peak, left, flops = _core.dry_run(params, dtypes, lent, step_without_trace)
    check_left(model, left)
    return peak, flops


def _lent_dtype(p: Any, policy: MixedPrecisionPolicy | None) -> _core.dtype | None:
    """Return the dtype of its gradient in a reduce buffer; None if the buffer lends nothing."""
    if p._unit is not None and p._unit.rank_dependent:
        return None
    given = p._unit if p._unit is not None else policy
    narrow = given is not None and p.dtype.is_floating_point
    return (given.reduce_dtype if narrow else None) or _compute_dtype(p, policy)


def check_left(model: Any, left: int) -> None:
    """Raise if a planning forward, which computes nothing, left tensors behind."""
    if left:
        raise RuntimeError(
            f"the forward of {type(model).__name__} keeps {left} bytes of tensors outside of the "
            "model (a global, a closure, a hook's list), where planning cannot take them back: "
            "they were not computed, so drop them, and keep such tensors in the model's attributes"
        )


def _compute_dtype(p: Any, policy: MixedPrecisionPolicy | None) -> _core.dtype:
    if p._unit is not None or policy is None or not p.dtype.is_floating_point:
        return p.dtype  # a sharded parameter has its full parameter's dtype
    return policy.param_dtype or p.dtype
