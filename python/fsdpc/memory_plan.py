"""How much memory a model will take on each rank, without building it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from fsdpc import _core, distributed
from fsdpc.fsdp_module import FSDPModule
from fsdpc.mesh import DeviceMesh
from fsdpc.policies import MixedPrecisionPolicy
from fsdpc.strategies import ShardingStrategy, as_strategy
from fsdpc.wrap import WrapPolicy, by_name, units_by

#: fp32 states that an optimizer keeps for each parameter.
STATES = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1}
POOLED_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that the engine will hold on a rank, by the categories of :func:`memory_stats`.

    ``wire`` is one copy of the parameters in the compute dtype for the ranks of a host that form a
    shard group; the others are each rank's own.
    """

    wire: int
    master: int
    grad: int
    state: int
    reduce: int

    @property
    def total(self) -> int:
        """All of them together, on the rank that the wire is counted on."""
        return self.wire + self.master + self.grad + self.state + self.reduce

    def __str__(self) -> str:
        names = ("wire", "master", "grad", "state", "reduce", "total")
        return "\n".join(f"{name:8}{getattr(self, name) / 1e6:14.3f} MB" for name in names)


@dataclass(frozen=True, kw_only=True)
class _UnitShape:
    specs: list[tuple[_core.dtype, tuple[int, ...]]]
    param_dtype: Any
    reduce_dtype: Any
    own_buffer: bool


def memory_plan(
    model: Any,
    mesh: DeviceMesh | tuple[int, int] | int | None = None,
    *,
    strategy: ShardingStrategy | str | None = None,
    plan: WrapPolicy | dict[str, dict[str, Any]] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    optimizer: str | int = "adamw",
    micro_steps: int = 1,
) -> MemoryPlan:
    """Compute what the engine will hold on each rank while a model trains.

    Parameters
    ----------
    model : Module
        Sharded: its own units and policies count. Not sharded, deferred ones included: ``plan`` and
        ``mp_policy`` say what :func:`fully_shard` would be given.
    mesh : DeviceMesh, (replicate, shard) or int, optional
        Of any size; a number shards over that many ranks. This run's world where not given.
    strategy : ShardingStrategy or str, optional
        NO_SHARD turns a number of ranks into replicas; SHARD_OPTIM keeps full gradients.
    plan, mp_policy
        As :func:`fully_shard` takes them, for a model that is not sharded.
    optimizer : str or int, default "adamw"
        Its name, or the fp32 states that it keeps for each parameter.
    micro_steps : int, default 1
        Of an optimizer step, in deterministic mode, which keeps partial sums of them.

    Returns
    -------
    MemoryPlan
        Equal to the run's own peaks, category by category, once the schedule is recorded and as
        long as no unit keeps gradients over several backwards (``no_sync``).
    """
    replicate, shard = _grid(mesh, strategy)
    keeps = strategy is not None and as_strategy(strategy) is ShardingStrategy.SHARD_OPTIM
    units = _sharded_units(model) if isinstance(model, FSDPModule) else []
    units = units or _planned_units(model, plan, mp_policy or MixedPrecisionPolicy())
    n_states = STATES[optimizer] if isinstance(optimizer, str) else int(optimizer)
    levels = 0
    if distributed.is_deterministic() and micro_steps > 2:
        levels = ceil(log2(micro_steps)) - 1
    sums = dict.fromkeys(("wire", "master", "grad", "state", "reduce"), 0)
    pooled: list[dict[str, int]] = []
    two_stages = replicate > 1 and shard > 1
    for unit in units:
        one = _core.plan_unit(unit.specs, shard, unit.param_dtype, unit.reduce_dtype)
        sums["wire"] += one["wire"]
        sums["master"] += one["master"]
        sums["grad"] += one["grad"] + levels * one["partial"]
        sums["state"] += n_states * one["state"]
        if unit.own_buffer or keeps:
            sums["reduce"] += one["reduce"] + (one["partial"] if two_stages else 0)
        elif one["reduce"]:
            pooled.append(one)
    if pooled:
        each = max(u["reduce"] for u in pooled)
        each += max(u["partial"] for u in pooled) if two_stages else 0
        sums["reduce"] += each * min(POOLED_BUFFERS, len(pooled))
    return MemoryPlan(**sums)


def _grid(mesh: Any, strategy: Any) -> tuple[int, int]:
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


def _sharded_units(model: Any) -> list[_UnitShape]:
    found: dict[Any, bool] = {}
    for m in model.modules():
        if isinstance(m, FSDPModule):
            inner = any(isinstance(c, FSDPModule) for c in m.modules() if c is not m)
            found[m._fsdpc_unit] = found.get(m._fsdpc_unit, False) or inner or not found
    return [
        _UnitShape(
            specs=[(dtype, shape) for _, dtype, shape in unit.params],
            param_dtype=unit.param_dtype,
            reduce_dtype=unit.reduce_dtype,
            own_buffer=own or unit.keep_grads,
        )
        for unit, own in found.items()
    ]


def _planned_units(model: Any, plan: Any, policy: MixedPrecisionPolicy) -> list[_UnitShape]:
    chosen: list[tuple[Any, dict[str, Any]]] = []
    if plan is not None:
        chosen = units_by(plan if callable(plan) else by_name(plan), model)
    chosen.append((model, {}))
    ids = {id(m) for m, _ in chosen}
    claimed: set[int] = set()
    units = []
    for module, options in chosen:
        own = options.get("mp_policy") or policy
        params = [p for p in module.parameters() if id(p) not in claimed]
        claimed.update(map(id, params))
        encloses = any(id(m) in ids for m in module.modules() if m is not module)
        units.append(
            _UnitShape(
                specs=[(p.dtype, p.shape) for p in params],
                param_dtype=own.param_dtype,
                reduce_dtype=own.reduce_dtype,
                own_buffer=encloses or module is model,
            )
        )
    return units
