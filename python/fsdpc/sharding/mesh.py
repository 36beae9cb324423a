"""Meshes, which arrange the ranks in a grid ``replicate x shard``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fsdpc import _core, distributed
from fsdpc.display import html
from fsdpc.tensors import device


class DeviceMesh:
    """A grid of ranks with one communicator along each dimension.

    Create it with :func:`init_device_mesh`. Ranks along the last dimension are consecutive.

    Examples
    --------
    >>> import fsdpc
    >>> mesh = fsdpc.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    >>> mesh.shape, mesh.ndim, mesh.mesh_dim_names
    ((1, 1), 2, ('replicate', 'shard'))
    """

    def __init__(
        self, comms: Sequence[_core.Comm], names: Sequence[str], shape: Sequence[int]
    ) -> None:
        self._comms = tuple(comms)
        self.mesh_dim_names: tuple[str, ...] = tuple(names)
        self.shape: tuple[int, ...] = tuple(shape)
        self.device_type: str = device.get_default_device()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> int:
        """Return the number of ranks along a dimension, or in the whole mesh by default."""
        return prod(self.shape) if dim is None else self.shape[dim]

    def get_local_rank(self, dim: int | str = 0) -> int:
        """Return this rank's coordinate along a dimension."""
        return self.comm(dim).rank

    def comm(self, dim: int | str) -> _core.Comm:
        """Return the communicator of this rank and those that differ from it only along ``dim``."""
        if isinstance(dim, str):
            dim = self._index(dim)
        return self._comms[dim]

    def _index(self, name: str) -> int:
        if name not in self.mesh_dim_names:
            raise KeyError(f"no mesh dimension '{name}'; there are {self.mesh_dim_names}")
        return self.mesh_dim_names.index(name)

    def __getitem__(self, name: str | tuple[str, ...]) -> DeviceMesh:
        names = (name,) if isinstance(name, str) else tuple(name)
        at = [self._index(n) for n in names]
        if at != sorted(set(at)):
            raise KeyError(f"{names}: name dimensions once, in the order {self.mesh_dim_names}")
        return DeviceMesh([self._comms[i] for i in at], names, [self.shape[i] for i in at])

    def __repr__(self) -> str:
        sizes = " x ".join(f"{n} {s}" for n, s in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"DeviceMesh({sizes})"

    def _repr_html_(self) -> str:
        """Return a picture of the grid, for display in notebooks."""
        return html.mesh(self)


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Arrange all ranks in a grid; collective.

    Parameters
    ----------
    device_type : str
        "cuda" makes the GPU this process's device; "cpu" has no effect.
    mesh_shape : sequence of int
        One size (plain sharding) or two (replicate, shard); their product is the world size.
    mesh_dim_names : sequence of str, optional
        Names that select sub-meshes; by default ("shard",) or ("replicate", "shard").

    Raises
    ------
    ValueError
        The product of the sizes is not the world size, or names and sizes differ in number.
    NotImplementedError
        This build or machine does not support the device type.
    RuntimeError
        There is no GPU, or tensors already exist on another device.

    Examples
    --------
    >>> import fsdpc
    >>> mesh = fsdpc.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    >>> mesh.size()
    1
    """
    if device_type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device type '{device_type}': ranks compute on 'cpu' or 'cuda'")
    if device_type == "cuda":
        device.set_default_device(device_type)
    shape = tuple(int(s) for s in mesh_shape)
    world = distributed.world()
    if len(shape) not in (1, 2) or any(s < 1 for s in shape):
        raise ValueError(f"a mesh has one or two dimensions of at least 1, got {shape}")
    if prod(shape) != world.size:
        raise ValueError(f"mesh {shape} has {prod(shape)} ranks; the world has {world.size}")
    names = tuple(mesh_dim_names or (("shard",) if len(shape) == 1 else ("replicate", "shard")))
    if len(names) != len(shape):
        raise ValueError(f"{len(names)} names {names} for {len(shape)} dimensions {shape}")
    if len(shape) == 1:
        return DeviceMesh([world], names, shape)
    row, column = divmod(world.rank, shape[1])
    shard = world if shape[0] == 1 else world.split(row, column)
    replicate = world if shape[1] == 1 else world.split(column, row)
    return DeviceMesh([replicate, shard], names, shape)
