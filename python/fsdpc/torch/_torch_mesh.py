"""Torch's side of a unit's mesh: the DeviceMesh and the placements of DTensors.

If ``torch.distributed`` is not initialized, it is initialized here with the back end ``fsdpc`` over
the ranks of the engine.
"""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdpc import _core, distributed
from fsdpc.sharding.rules import Placement
from fsdpc.torch import _device
from fsdpc.torch._param_layout import joined


def ensure_group() -> None:
    """Initialize ``torch.distributed`` over the ranks of the engine, unless it is initialized."""
    if dist.is_initialized():
        return
    world = distributed.world()
    is_cuda = not _device.on_cpu() and torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group(
        "nccl" if is_cuda else "fsdpc",
        store=_store(world),
        rank=world.rank,
        world_size=world.size,
    )


def _store(world: _core.Comm) -> Any:
    """Return a store that all ranks share; collective."""
    if world.size == 1:
        return dist.HashStore()
    if world.hosts == 1:
        path = Path(tempfile.gettempdir()) / f"fsdpc-{uuid.uuid4().hex}"
        return dist.FileStore(_told(world, str(path)), world.size)
    store = None
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    if world.rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    address = _told(world, f"{host} {store.port if store else 0}")
    host, port = address.split()
    return store or dist.TCPStore(host, int(port), is_master=False)


def _told(world: _core.Comm, text: str) -> str:
    """Return rank 0's text on every rank; collective."""
    data = np.zeros(512, np.uint8)
    data[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    sent = _core.tensor(data)
    world.broadcast(sent, 0)
    return sent.numpy().tobytes().rstrip(b"\0").decode()


def mesh_of(given: Any, where: Placement) -> tuple[DeviceMesh, tuple[Any, ...]]:
    """Return torch's mesh for the argument of ``fully_shard``, and the placements of parameters.

    Parameters
    ----------
    given : DeviceMesh of torch or fsdpc, process group or pair of them, or None
    where : Placement
        The communicators that the argument describes.
    """
    ensure_group()
    shards = where.comms[0].size
    replicas = where.comms[1].size if len(where.comms) > 1 else 1
    if isinstance(given, DeviceMesh):
        mesh = given
    elif _is_group(given):
        groups = [given] if isinstance(given, dist.ProcessGroup) else list(reversed(given))
        mesh = _from_groups(groups)
    else:
        ndim = 2 if getattr(given, "ndim", 1) == 2 or (replicas > 1 and shards > 1) else 1
        shape = (replicas, shards) if ndim == 2 else (max(replicas, shards),)
        mesh = _made(where, shape)
    if mesh.ndim == 2:
        return mesh, (Replicate(), Shard(0))
    return mesh, (Shard(0),) if replicas == 1 else (Replicate(),)


def data_mesh(mesh: Any, dims: Any) -> tuple[DeviceMesh, tuple[str, ...]]:
    """Return the part of a mesh that ``DataParallelMeshDims`` name, and these names.

    It is (shard), (replicate) or (replicate, shard); several dimensions of one kind are flattened.

    Raises
    ------
    ValueError
        The mesh has no dimension of a name.
    """
    shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    for name in (*replicate, *shard):
        if name not in names:
            raise ValueError(f"dp_mesh_dims: '{name}' not found in mesh.mesh_dim_names {names}")
    return _data_mesh(mesh, shard, replicate), (*replicate, *shard)


@cache
def _data_mesh(mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]) -> DeviceMesh:
    parts = [
        mesh[names] if len(names) == 1 else mesh[names]._flatten("_".join(names))
        for names in (replicate, shard)
        if names
    ]
    return parts[0] if len(parts) == 1 else joined(*parts)


def _is_group(given: Any) -> bool:
    return isinstance(given, (dist.ProcessGroup, tuple, list))


def _from_groups(groups: Sequence[Any]) -> DeviceMesh:
    """Return the mesh of a process group, or of (replicate, shard)."""
    kind = _device.home().type
    if len(groups) == 1:
        try:
            return DeviceMesh.from_group(groups[0], kind)
        except RuntimeError:  # a group that torch.distributed did not create has no name
            return _without_groups(dist.get_process_group_ranks(groups[0]))
    rows = [None] * dist.get_world_size(groups[0])
    dist.all_gather_object(rows, dist.get_process_group_ranks(groups[1]), groups[0])
    mesh = torch.tensor(rows)
    return DeviceMesh.from_group(list(groups), kind, mesh, mesh_dim_names=("replicate", "shard"))


def _without_groups(ranks: Any, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh over which tensors can be placed, but not communicate."""
    return DeviceMesh(_device.home().type, ranks, mesh_dim_names=names, _init_backend=False)


#: Meshes of a live default group, by device type and ranks. A model's units share them.
_known: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()


def _made(where: Placement, shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of this shape, created once for each default group; collective."""
    world = dist.get_world_size()
    ranks = (np.arange(world) if np.prod(shape) == world else _ranks_of(where)).reshape(shape)
    known = _known.setdefault(dist.group.WORLD, {})
    key = _device.home().type, shape, ranks.tobytes()
    if key not in known:
        names = ("replicate", "shard") if len(shape) == 2 else None
        make = _with_groups if ranks.size == world else _without_groups
        known[key] = make(ranks, names)
    return known[key]


def _ranks_of(where: Placement) -> np.ndarray:
    """Return the ranks of communicators that some ranks share; collective over them."""
    ranks = np.array([dist.get_rank()])
    for comm in where.comms:
        if comm.size > 1:
            ranks = comm.all_gather(_core.tensor(ranks)).numpy().reshape(-1)
    return ranks


def _with_groups(ranks: np.ndarray, names: tuple[str, ...] | None) -> DeviceMesh:
    """Return a mesh of all ranks, in which each dimension has its process groups."""
    try:
        return init_device_mesh(_device.home().type, ranks.shape, mesh_dim_names=names)
    except RuntimeError:  # the default group has no name, as torch did not create it
        return _without_groups(ranks, names)
