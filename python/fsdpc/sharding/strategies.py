"""Sharding strategies by name: the mesh of each, and when it frees parameters and gradients."""

from __future__ import annotations

from enum import Enum
from typing import Any

from fsdpc import _core, distributed
from fsdpc.distributed import group
from fsdpc.sharding.mesh import DeviceMesh, init_device_mesh


class ShardingStrategy(Enum):
    """What to shard, named as in PyTorch where possible.

    ====================  =========================  =======================================
    name                  mesh                       shared out
    ====================  =========================  =======================================
    NO_SHARD              world x 1                  nothing (DDP)
    SHARD_OPTIM           1 x world                  optimizer (ZeRO-1); full gradients kept
    SHARD_GRAD_OP         1 x world                  optimizer, gradients (ZeRO-2)
    FULL_SHARD            1 x world                  all (ZeRO-3)
    HYBRID_SHARD          replicate x shard, given   all, within ``shard``
    HYBRID_SHARD_ZERO2    replicate x shard, given   optimizer, gradients, within ``shard``
    ====================  =========================  =======================================

    On several hosts the mesh is optional: by default, each host is a replica and its ranks form a
    shard group.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.ShardingStrategy["FULL_SHARD"].keeps_params
    False
    """

    NO_SHARD = "NO_SHARD"
    SHARD_OPTIM = "SHARD_OPTIM"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    _HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"  # PyTorch's name

    @property
    def keeps_params(self) -> bool:
        """Whether parameters remain gathered after forward."""
        return self.name not in ("FULL_SHARD", "HYBRID_SHARD")


def as_strategy(value: ShardingStrategy | str) -> ShardingStrategy:
    """Return the strategy with this name."""
    if isinstance(value, ShardingStrategy):
        return value
    try:
        return ShardingStrategy[str(value).upper()]
    except KeyError:
        names = ", ".join(each.name for each in ShardingStrategy)
        raise ValueError(f"no strategy '{value}'; there are {names}") from None


def apply_strategy(
    value: ShardingStrategy | str | None, mesh: DeviceMesh | None, reshard_after_forward: Any
) -> tuple[DeviceMesh | None, Any, bool]:
    """Return mesh, ``reshard_after_forward`` (None if unset), and whether to keep full gradients.

    Raises
    ------
    ValueError
        The mesh or flag contradicts the strategy.
    """
    if value is None:
        return mesh, reshard_after_forward, False
    strategy = as_strategy(value)
    name = strategy.name
    hybrid = name.startswith("HYBRID")
    if hybrid and mesh is None and distributed.world().hosts > 1:
        mesh = host_mesh()
    if hybrid and (mesh is None or mesh.ndim != 2):
        raise ValueError(
            f"{name} needs a mesh of two dimensions, got {mesh}: "
            "init_device_mesh('cpu', (replicate, shard))"
        )
    if strategy is ShardingStrategy.NO_SHARD:
        if mesh is None or mesh.ndim == 1:
            mesh = replicated_mesh(mesh)
        if mesh.shape[1] != 1:
            raise ValueError(f"NO_SHARD needs a mesh of world x 1, got {mesh}")
    elif not hybrid and mesh is not None and mesh.ndim == 2 and mesh.shape[0] > 1:
        raise ValueError(f"{name} shards over all ranks, but {mesh} has replicas: use HYBRID_SHARD")
    if strategy.keeps_params and reshard_after_forward:
        raise ValueError(f"{name} keeps parameters after forward; reshard_after_forward is True")
    reshard = False if strategy.keeps_params else reshard_after_forward
    return mesh, reshard, strategy is ShardingStrategy.SHARD_OPTIM


def strategy_name(
    value: ShardingStrategy | str | None, replicas: int, shards: int, reshard: bool | None
) -> str:
    """Return the name of a unit's strategy, even if a mesh and a flag specified it."""
    if value is not None:
        return as_strategy(value).name
    if shards == 1 and replicas > 1:
        return "NO_SHARD"
    if replicas > 1:
        return "HYBRID_SHARD_ZERO2" if reshard is False else "HYBRID_SHARD"
    return "SHARD_GRAD_OP" if reshard is False else "FULL_SHARD"


_made: list[tuple[_core.Comm, int, DeviceMesh]] = []  # created once for all units


def _replicas_of(comm: _core.Comm, replicas: int) -> DeviceMesh:
    """Return a mesh of a group's ranks with this many replicas; collective on the first call."""
    for known, number, made in _made:
        if known is comm and number == replicas:
            return made
    if comm is group._world:
        _made[:] = [each for each in _made if each[0] is comm]  # drops meshes of an earlier world
        made = init_device_mesh("cpu", (replicas, comm.size // replicas))
    else:
        single = _core.Comm(0, 1, "")
        made = DeviceMesh([comm, single], ("replicate", "shard"), (comm.size, 1))
    _made.append((comm, replicas, made))
    return made


def host_mesh() -> DeviceMesh:
    """Return the mesh in which each host of this run is a replica."""
    return _replicas_of(distributed.world(), distributed.world().hosts)


def replicated_mesh(mesh: DeviceMesh | None = None) -> DeviceMesh:
    """Return a mesh that replicates without sharding.

    Parameters
    ----------
    mesh : DeviceMesh, optional
        A one-dimensional mesh of the ranks that hold the same parameters; by default all ranks.
    """
    comm = distributed.world() if mesh is None else mesh.comm(0)
    return _replicas_of(comm, comm.size)
