"""Convert torch's meshes and process groups to meshes of the engine's communicators.

A mesh that contains every rank is split off from the world, so its messages name world ranks and
all ranks learn of a failure. In any other mesh (a pipeline's data parallel dimension, or a group
from ``new_group``), only the mesh's ranks join one another.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdpc import _core, distributed
from fsdpc.distributed import group as ranks
from fsdpc.distributed import watch
from fsdpc.distributed.environment import count_hosts, this_host
from fsdpc.sharding.mesh import DeviceMesh
from fsdpc.torch import _device
from fsdpc.torch._transport import carry


def join() -> _core.Comm:
    """Return the world; if there is none, create it from torch.distributed or the environment."""
    if not distributed.is_initialized():
        _join_group()
    return distributed.world()


def _join_group() -> bool:
    """Use the ranks of torch.distributed, if it is initialized, as the world."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    world = _meet(dist.group.WORLD)
    ranks._local_rank = world.rank % (world.size // world.hosts)
    ranks._world = world
    return True


ranks._join_torch = _join_group


def as_mesh(mesh: Any) -> DeviceMesh:
    """Return the engine's mesh for a torch mesh, an engine mesh, or None, which means all ranks.

    A process group is accepted too, as is a pair of groups (shard, replicate). Collective over the
    mesh.

    Raises
    ------
    TypeError, ValueError
        The argument is none of these, has more than two dimensions, or lacks this rank.
    AssertionError
        The mesh has two unnamed dimensions, as in torch.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is None:
        world = join()
        return DeviceMesh([world], ["shard"], [world.size])
    if hasattr(mesh, "device_type") and hasattr(mesh, "get_group"):
        groups, names = _dimensions(mesh)
    else:
        groups = list(reversed(mesh)) if isinstance(mesh, (tuple, list)) else [mesh]
        names = ("replicate", "shard")[-len(groups) :]
        if any(g == dist.GroupMember.NON_GROUP_MEMBER for g in groups):
            raise ValueError(f"rank {dist.get_rank()} is not in the process group that it gives")
        if not all(isinstance(g, dist.ProcessGroup) for g in groups) or len(groups) > 2:
            raise TypeError(f"mesh: a DeviceMesh of torch or fsdpc, got {type(mesh).__name__}")
    comms = _comms(groups)
    return DeviceMesh(comms, names, [comm.size for comm in comms])


def _dimensions(mesh: Any) -> tuple[list[Any], Sequence[str]]:
    """Return the process group and the name of each dimension of a torch mesh."""
    if mesh.device_type != _device.home().type:
        raise ValueError(
            f"a mesh of device type '{mesh.device_type}', and the engine computes on "
            f"{_device.home()}: make the mesh for that"
        )
    if mesh.ndim > 2:
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: pick (shard) or "
            "(replicate, shard) of it"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            "a mesh of two dimensions without names. Please init the 2D mesh for HSDP with "
            'mesh_dim_names specified, as ("replicate", "shard")'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}: call fully_shard only on its ranks"
        )
    return [mesh.get_group(dim) for dim in range(mesh.ndim)], mesh.mesh_dim_names or ("shard",)


#: Communicators of live process groups, split off a world or joined separately (None). A model's
#: units share them.
_known: WeakKeyDictionary[Any, dict[_core.Comm | None, _core.Comm]] = WeakKeyDictionary()


def _comms(groups: list[Any]) -> list[_core.Comm]:
    """Return one communicator per process group; each group is one dimension of a mesh."""
    whole = prod(map(dist.get_world_size, groups)) == dist.get_world_size()
    world = join() if whole else None
    comms = []
    for group in reversed(groups):
        known = _known.setdefault(group, {})
        if world not in known:
            known[world] = _meet(group) if world is None else _part(group, world)
        comms.insert(0, known[world])
    return comms


def comm_of(mesh: Any, dim: int) -> _core.Comm:
    """Return the communicator of one dimension of a torch mesh; collective over its ranks."""
    return _comms([mesh.get_group(dim)])[0]


def _part(group: Any, world: _core.Comm) -> _core.Comm:
    ranks = dist.get_process_group_ranks(group)
    return world if len(ranks) == world.size else world.split(min(ranks), dist.get_rank(group))


def _meet(group: Any) -> _core.Comm:
    """Connect the ranks of a process group with each other."""
    told: list[Any] = [None] * dist.get_world_size(group)
    mine = (this_host(), f"torch:{uuid.uuid4().hex}", uuid.uuid4().hex)
    dist.all_gather_object(told, mine, group)
    hosts = count_hosts([host for host, _, _ in told])
    _, address, secret = told[0]
    comm = _core.Comm(
        dist.get_rank(group),
        len(told),
        address,
        library=os.environ.get("FSDPC_NCCL_LIB") or None,
        secret=secret,
        hosts=hosts,
        transport=carry(group, hosts) if hosts > 1 else None,
        ranks=dist.get_process_group_ranks(group) if hosts == 1 else None,
    )
    ranks._met.append(comm)
    if hosts > 1:
        watch.start(comm, hosts)
    return comm
