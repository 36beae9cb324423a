"""Gather parameters by the hooks of their subclasses, as FSDP2 does.

    rows -> fsdp_pre_all_gather -> all-gather of the bytes -> fsdp_post_all_gather -> unsharded

A unit stores such a parameter's values as it stores any other, so optimizers, norms and checkpoints
need nothing more. Only the unsharded parameter differs: modules see what the hooks make of it. It
is created once and then filled again, because autograd may have saved it. Its memory is freed when
the unit reshards.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdpc.torch import _compiled

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

#: The version of unsharded parameters that have been freed (csrc/bind/torch/show.c).
_RESHARDED = 1 << 40


class Gather:
    """Fills one unsharded parameter; creating it is collective.

    Parameters
    ----------
    state : UnitState
    i : int
        The index of the parameter.
    local : Tensor
        The subclass around this rank's rows.
    """

    def __init__(self, state: UnitState, i: int, local: torch.Tensor) -> None:
        rows, mesh = state.rows[i], state.recipe.mesh
        name = f"'{state.names[i]}' of unit '{state.unit.name}'"
        why = ""
        if local.dtype is not rows.dtype:
            why = (
                f"its unit stores {rows.dtype}, not {local.dtype}: convert it before "
                "fully_shard(), and leave out master_dtype"
            )
        elif state.unit.rank_dependent:
            why = "every rank must call them: leave out set_reduce_scatter_unused_params()"
        elif mesh is None or mesh.shape[-1] != state.comms[0].size:
            why = "its unit is not sharded: leave out NO_SHARD and dtensor=False"
        if why:
            raise NotImplementedError(
                f"parameter {name}, a {type(local).__name__}, has gather hooks, and {why}"
            )
        self.mesh: Any = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
        self.local, self.policy = local, state.policy
        self.shape: torch.Size = state.shapes[i]
        self.stride: tuple[int, ...] = torch.empty(self.shape, device="meta").stride()
        self.dtype: torch.dtype = state.policy.param_dtype or rows.dtype
        self.padded = -(-self.shape[0] // state.comms[0].size)
        held = next(owner for owner, _, index in state.slots if index == i)
        inside = (m for module in state.modules for m in module.modules())
        self.module: nn.Module = next(m for m in inside if m._parameters is held)
        self.version = -1
        self.outputs: list[torch.Tensor] = []
        self.inner: tuple[torch.Tensor, ...] = ()
        gathered, metadata = self._gather()
        made, self.inner = local.fsdp_post_all_gather(gathered, metadata, self.dtype)  # type: ignore[attr-defined]
        full = made
        if made.shape != self.shape:  # padded
            full = torch.as_strided(made, self.shape, self.stride, 0)
        self.unsharded: nn.Parameter = nn.Parameter(full, requires_grad=False)
        # A hook may write as many rows as it returned, and may change a subclass itself.
        self.out: torch.Tensor = made if type(made) is torch.Tensor else self.unsharded

    def refresh(self, version: int) -> None:
        """Fill the unsharded parameter for this version of the weights, or free its memory."""
        if version == self.version:
            return
        self.version = version
        with torch.inference_mode(False), torch.no_grad():
            if version == _RESHARDED:
                for t in (*self.outputs, *self.inner):
                    t.untyped_storage().resize_(0)
                return
            for t in (*self.outputs, *self.inner):
                t.untyped_storage().resize_(t.numel() * t.itemsize)
            gathered, metadata = self._gather()
            self.local.fsdp_post_all_gather(  # type: ignore[attr-defined]
                gathered, metadata, self.dtype, out=self.out
            )

    def _gather(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the gathered tensors and this rank's metadata."""
        hook = self.local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        options = [self.mesh, self.shape, self.stride, self.module, self.policy]
        if len(inspect.signature(hook).parameters) == 1:  # of torch 2.5
            options = options[:1]
        inputs, metadata = hook(*options)
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        inputs = [self._pad(t.detach()) for t in inputs]
        size = self.mesh.size()
        if not self.outputs:
            self.outputs = [t.new_empty(size * t.numel()) for t in inputs]
        for t, output in zip(inputs, self.outputs, strict=True):
            given, taken = t.reshape(-1).view(torch.uint8), output.view(torch.uint8)
            if size > 1:
                dist.all_gather_into_tensor(taken, given, group=self.mesh.get_group())
            else:
                taken.copy_(given)
        pairs = zip(inputs, self.outputs, strict=True)
        return tuple(output.view(-1, *t.shape[1:]) for t, output in pairs), metadata

    def _pad(self, t: torch.Tensor) -> torch.Tensor:
        """Give all ranks as many rows as the first rank has."""
        if self.shape[0] % self.mesh.size() == 0 or t.shape[:1] == (self.padded,):
            return t
        if t.shape[:1] != self.local.shape[:1]:
            raise ValueError(
                f"fsdp_pre_all_gather of a {type(self.local).__name__} {tuple(self.shape)} returns "
                f"{tuple(t.shape)} for {len(self.local)} rows: return {self.padded} rows"
            )
        return torch.cat([t, t.new_zeros((self.padded - t.shape[0], *t.shape[1:]))])


# The compiler must not compile the hooks of one parameter into the code inside units.
_compiled.leave_out(Gather.refresh, inside=True)
