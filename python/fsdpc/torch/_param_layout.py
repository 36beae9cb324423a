"""How a unit stores a parameter, and what modules and users see of it.

A unit shards dense tensors along dimension 0. A parameter may differ from that in two ways:

- ``shard_placement_fn`` shards it along another dimension. The unit stores it with that dimension
  first, and what users see is a permuted view.
- It is a DTensor over another mesh, for example a tensor parallel one. The unit stores this rank's
  local tensor. The sharded parameter is a DTensor over both meshes, and the unsharded parameter is
  a DTensor over the other mesh. With ``dp_mesh_dims``, it is a DTensor over one mesh with the
  dimensions of both, and so is the unsharded parameter.

A parameter of a tensor subclass has a `kind` as well (_subclasses.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # torch 2.5
    from torch.distributed.tensor._utils import _StridedShard  # type: ignore[no-redef]

if TYPE_CHECKING:
    from fsdpc.torch._subclasses import Kind


def is_cut(placement: Any) -> bool:
    """Return whether ranks have different parts; ``is_shard()`` is false for strided shards."""
    return isinstance(placement, (Shard, _StridedShard))


@dataclass(frozen=True)
class ParamLayout:
    """The layout of one parameter.

    Parameters
    ----------
    shape : torch.Size
        The logical shape.
    stored : torch.Size
        The shape that the unit shards along dimension 0.
    dim : int, default 0
        The dimension of the parameter that the unit shards.
    spec : DTensorSpec, optional
        The parameter's placements on another mesh.
    unsharded : DTensorSpec, optional
        The unsharded parameter's placements.
    data : tuple of int, default ()
        The dimensions of the unsharded parameter's mesh that are the unit's own.
    kind : Kind, optional
        How the unit stores a tensor subclass. Shapes are those of the stored tensor.
    """

    shape: torch.Size
    stored: torch.Size
    dim: int = 0
    spec: DTensorSpec | None = None
    unsharded: DTensorSpec | None = None
    data: tuple[int, ...] = ()
    kind: Kind | None = None

    @staticmethod
    def of(
        p: torch.Tensor, dim: int, names: Sequence[str] = (), kind: Kind | None = None
    ) -> ParamLayout:
        """Return the layout of a parameter that was given to ``fully_shard``.

        ``names`` are the unit's own dimensions of the parameter's mesh.
        """
        local = local_of(p)
        stored = local.movedim(dim, 0).shape if dim else local.shape
        if not isinstance(p, DTensor):
            return ParamLayout(p.shape, stored, dim, kind=kind)
        all_names = p.device_mesh.mesh_dim_names or ()
        data = tuple(k for k, name in enumerate(all_names) if name in names)
        return ParamLayout(p.shape, stored, dim, _without(p._spec, data), p._spec, data)

    def __str__(self) -> str:
        """Describe what differs from a plain layout; equal on all ranks of the unit."""
        dim = f" Shard({self.dim})" if self.dim else ""
        over = f" over {self.spec.placements}" if self.spec is not None else ""
        return dim + over + ("" if self.kind is None else str(self.kind))

    @property
    def is_plain(self) -> bool:
        """Return whether the unit stores the parameter as it is."""
        return self.unsharded is None and self.dim == 0

    def plain(self, value: torch.Tensor) -> torch.Tensor:
        """Return a full value as the plain tensor that the unit stores of a subclass."""
        return value if self.kind is None else self.kind.plain(value)

    def store(self, value: torch.Tensor) -> torch.Tensor:
        """Return what the unit stores of a full value, or of a DTensor placed like the parameter.

        The result may be a view.
        """
        value = self.plain(value)
        if isinstance(value, DTensor):
            value = value._local_tensor
        elif self.unsharded is not None:
            spec = self.unsharded
            cut = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
            value = cut._local_tensor
        return self.rows_of(value)

    def rows_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the stored rows of a sharded DTensor's local tensor; the inverse of `show`."""
        return local.movedim(self.dim, 0) if self.dim else local

    def show(self, stored: torch.Tensor) -> torch.Tensor:
        """Return stored rows with their dimensions in the parameter's order."""
        return stored.movedim(0, self.dim) if self.dim else stored

    def place(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what the unit stores as modules see it: with `unsharded`, as a DTensor."""
        value = self.show(stored)
        if self.unsharded is None:
            return value
        return DTensor(value, spec_as(self.unsharded, value.dtype), requires_grad=False)

    def full(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the full value of what the unit stores; collective over the other mesh."""
        value = self.place(stored)
        with torch.no_grad():
            return value.full_tensor() if isinstance(value, DTensor) else value.contiguous()

    def take(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the stored part of an unsharded parameter's gradient.

        A partial gradient is reduced over the other mesh; the unit reduces over its own.
        """
        with torch.no_grad():
            if self.unsharded is not None:
                if not isinstance(grad, DTensor):
                    raise TypeError(f"a plain gradient of a parameter over {self.unsharded.mesh}")
                pairs = zip(grad.placements, self.unsharded.placements, strict=True)
                wanted = tuple(g if k in self.data else p for k, (g, p) in enumerate(pairs))
                if grad.placements != wanted:
                    grad = grad.redistribute(placements=wanted)
                grad = grad._local_tensor
                if hasattr(grad, "wait"):  # an asynchronous collective's result
                    grad = grad.wait()
            return self.rows_of(grad)

    def placed(
        self, mesh: DeviceMesh, placements: Sequence[Any]
    ) -> tuple[DeviceMesh, tuple[Any, ...]]:
        """Return the mesh and placements of the sharded parameter.

        Parameters
        ----------
        mesh : DeviceMesh
            The unit's mesh.
        placements : sequence of Placement
            How the unit places parameters that it shards along dimension 0.
        """
        parts = 1
        if self.spec is not None:
            for k, placement in enumerate(self.spec.placements):
                if is_cut(placement) and placement.dim == self.dim:
                    parts *= self.spec.mesh.size(k)
        own = _StridedShard(self.dim, split_factor=parts) if parts > 1 else Shard(self.dim)
        ours = tuple(own if is_cut(p) else p for p in placements)
        if self.spec is None:
            return mesh, ours
        return joined(mesh, self.spec.mesh), (*ours, *self.spec.placements)

    def bounds(self) -> list[tuple[int, int]]:
        """Return the begin and end, in each dimension, of this rank's part over the other mesh."""
        bounds = [(0, extent) for extent in self.shape]
        for k, placement in enumerate(self.spec.placements) if self.spec is not None else ():
            if is_cut(placement):
                begin, end = bounds[placement.dim]
                chunk = -(-(end - begin) // self.spec.mesh.size(k))
                begin = min(end, begin + chunk * self.spec.mesh.get_local_rank(k))
                bounds[placement.dim] = begin, min(end, begin + chunk)
        return bounds


def _without(spec: DTensorSpec, dims: Sequence[int]) -> DTensorSpec | None:
    """Return the placements on a mesh's other dimensions, or None if there are none."""
    rest = [k for k in range(spec.mesh.ndim) if k not in dims]
    if len(rest) == spec.mesh.ndim or not rest:
        return spec if rest else None
    mesh = spec.mesh[tuple(spec.mesh.mesh_dim_names[k] for k in rest)]
    return DTensorSpec(mesh, tuple(spec.placements[k] for k in rest), tensor_meta=spec.tensor_meta)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, or a plain tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_as(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of a tensor that differs from another one only in its dtype."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype is dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=dtype))


def check_spec(name: str, p: DTensor) -> None:
    """Raise if a DTensor cannot be sharded further.

    Raises
    ------
    NotImplementedError
        The error names the placements.
    """
    for placement in p.placements:
        if not isinstance(placement, (Shard, Replicate)):
            raise NotImplementedError(
                f"parameter '{name}' is a DTensor placed as {p.placements}: fully_shard shards "
                "what is placed by Shard and Replicate"
            )


def check_mesh(
    name: str, p: torch.Tensor, mesh: Any, spmd: DeviceMesh | None, names: Sequence[str]
) -> None:
    """Raise if a DTensor's mesh cannot be joined with the mesh given to ``fully_shard``.

    Parameters
    ----------
    name : str
    p : Tensor
    mesh : DeviceMesh
        The unit's mesh.
    spmd : DeviceMesh, optional
        With ``dp_mesh_dims``, the mesh of which ``names`` are the unit's dimensions.
    names : sequence of str

    Raises
    ------
    ValueError
        The error names the parameter and the meshes.
    """
    if spmd is not None:
        _check_spmd(name, p, spmd, names)
        return
    if not isinstance(p, DTensor):
        return
    try:
        both = joined(mesh, p.device_mesh)
        known = both.mesh.unique().numel() == both.mesh.numel()
    except (RuntimeError, KeyError, AttributeError, TypeError, ValueError, AssertionError):
        known = False
    if not known:
        raise ValueError(
            f"parameter '{name}' is a DTensor over {p.device_mesh}, and fully_shard's mesh is "
            f"{mesh}: give it the data parallel dimensions of the same mesh, as in "
            'mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")) and mesh=mesh["dp"]'
        )


def _check_spmd(name: str, p: torch.Tensor, spmd: DeviceMesh, names: Sequence[str]) -> None:
    all_names = spmd.mesh_dim_names or ()
    if not isinstance(p, DTensor):
        others = [n for k, n in enumerate(all_names) if n not in names and spmd.size(k) > 1]
        if others:
            raise ValueError(
                f"parameter '{name}' is plain, and dp_mesh_dims leaves {others} of {spmd}: such "
                "parameters must be DTensors on the full mesh, whose placements say how ranks "
                "of these dimensions differ"
            )
    elif p.device_mesh != spmd:
        raise ValueError(f"parameter '{name}' is a DTensor over {p.device_mesh}, not over {spmd}")
    elif any(is_cut(p.placements[all_names.index(n)]) for n in names):
        raise ValueError(
            f"parameter '{name}' is placed as {p.placements} on {spmd}. Expected Replicate() on "
            f"the dimensions of dp_mesh_dims, {list(names)}"
        )


@cache
def joined(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the dimensions of two meshes that are parts of the same one."""
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([mesh, other])
    from torch.distributed.device_mesh import _mesh_resources

    root = _mesh_resources.get_root_mesh(mesh)
    return root[(*mesh.mesh_dim_names, *other.mesh_dim_names)]  # type: ignore[misc]


@cache
def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh, in order."""
    return sorted(mesh.mesh.flatten().tolist())
