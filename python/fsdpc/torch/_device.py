"""The engine's device in torch's terms, and the ordering of both libraries' work on it.

A CPU needs no synchronisation. GPU kernels run asynchronously, and torch's run on its current
stream. Whenever torch calls the engine, its current stream therefore becomes the engine's main
stream (:func:`join`; TorchUnit does this itself, also in backward's threads). This orders the work
of both libraries without making either wait for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdpc import _core
from fsdpc.tensors import device

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

_over: Callable[[_core.Tensor], torch.Tensor] = torch.from_dlpack
_under: Callable[[torch.Tensor], _core.Tensor] = _core.from_dlpack


def on_cpu() -> bool:
    """Return whether the engine computes on the CPU."""
    return _core.device_name() == "cpu"


def home() -> torch.device:
    """Return the device that all sharded and unsharded parameters are on."""
    return torch.device("cpu") if on_cpu() else torch.device("cuda", _core.device_ordinal())


def raw_stream() -> int:
    """Return the handle of torch's current stream on the engine's GPU."""
    return torch._C._cuda_getCurrentRawStream(_core.device_ordinal())


def streams() -> Callable[[], int] | None:
    """Return a function that returns torch's current stream, or None on a CPU."""
    return None if on_cpu() else raw_stream


def join() -> None:
    """Order the engine's next work after the work on torch's current stream."""
    if not on_cpu():
        _core.adopt_stream(raw_stream())


def to_torch(memory: _core.Tensor) -> torch.Tensor:
    """Return a torch tensor over the engine's memory."""
    return _over(memory)


def gathered(state: UnitState, index: int, what: bool | torch.Tensor) -> torch.Tensor:
    """Gather a parameter (False), its gradient (True) or the tensor with these rows; collective.

    The memory comes from torch, because users keep the result. Torch's allocator can often reuse
    memory, for example that of the unsharded parameters. The engine would allocate new pages, and
    touching a page for the first time costs several times as much as copying it.
    """
    if isinstance(what, torch.Tensor):
        dtype, rows = what.dtype, to_engine(what)
    else:
        dtype, rows = state.dtypes[index], what  # the unit's: a conversion changes tensors first
        dtype = _grad_dtype(dtype) if what else dtype
    layout = state.layouts[index]
    stored = torch.empty(layout.stored, dtype=dtype, device=home())
    state.unit.collect(index, rows, to_engine(stored))
    return stored if layout.is_plain else layout.full(stored)


def _grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the engine sums the gradients of masters of a given dtype."""
    return torch.promote_types(dtype, torch.float32)


def to_engine(t: torch.Tensor) -> _core.Tensor:
    """Return an engine tensor over a torch tensor's memory, or a copy from another device."""
    join()
    at = home()
    return _under(t if t.device == at else t.to(at))


def takes_back() -> bool:
    """Return whether torch's allocator can reuse memory while a unit does not need it."""
    return not on_cpu()


def like(memory: _core.Tensor) -> torch.Tensor:
    """Allocate a torch tensor with the same shape and dtype."""
    dtype = getattr(torch, memory.dtype.name)
    return torch.empty(memory.shape, dtype=dtype, device=home())


def grad_memory(unit: _core.Unit, masters: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Allocate memory for a unit's gradient shards, given its masters.

    Return None if a policy offloads the gradients, which are then in the unit's own memory.
    """
    if unit.offload and unit.offload[4]:
        return None
    if not takes_back():
        return [_over(m) for m in _core.grad_memory(unit)]
    return [
        torch.empty_like(m, dtype=_grad_dtype(m.dtype))
        for m in masters[: unit.trained_groups]
    ]


class Lent:
    """Torch memory that the engine borrows; the extension calls these methods."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.storage: torch.UntypedStorage = flat.untyped_storage()
        self.bytes: int = self.storage.nbytes()
        self.users: int | None = None  # before the first count

    def count_users(self) -> int:
        """Return the number of tensors and Python objects that refer to the memory."""
        return torch._C._storage_Use_Count(self.storage._cdata)

    @property
    def is_kept(self) -> bool:
        """Return whether more than ``users`` objects refer to the memory."""
        return self.users is not None and self.count_users() > self.users

    def take(self) -> int:
        """Return the memory's address, allocating the memory again if :meth:`give` released it."""
        if self.storage.nbytes() != self.bytes:
            self.storage.resize_(self.bytes)
        return self.storage.data_ptr()

    def give(self) -> None:
        """Release the memory to torch's allocator; the tensors survive, without storage."""
        self.storage.resize_(0)


def choose(params: Sequence[tuple[str, nn.Parameter]], asked: str | None = None) -> None:
    """Raise unless parameters are on the engine's device, which the first unit on a GPU chooses.

    Parameters
    ----------
    params : sequence of (str, Parameter)
        Parameters of one unit, by name; those on the meta device fit anywhere.
    asked : str, optional
        A device type that the user chose, such as the mesh's; this also sets the engine's device.

    Raises
    ------
    ValueError
        They are on several devices, or not on the engine's; the error suggests a call.
    """
    places: dict[torch.device, str] = {}
    for name, p in params:
        if not p.is_meta:
            places.setdefault(p.device, name)
    if len(places) > 1:
        where = ", ".join(f"'{name}' is on {at}" for at, name in places.items())
        raise ValueError(
            f"the parameters of one unit are on several devices ({where}): move the module to one "
            "before fully_shard()"
        )
    if on_cpu() and "cuda" in (asked, *(at.type for at in places)):
        try:
            device.set_default_device("cuda")
        except RuntimeError as error:
            raise ValueError(
                "the module is to be sharded on a GPU, and the engine computes on the CPU: call "
                f'fsdpc.set_default_device("cuda") before anything else of fsdpc ({error})'
            ) from None
    for at, name in places.items():
        if at != home():
            raise ValueError(
                f"parameter '{name}' is on {at}, and the engine computes on {home()}: "
                f'model.to("{home()}") before fully_shard()'
            )
    if not on_cpu():
        _core.set_reclaim(torch.cuda.empty_cache)  # torch keeps memory that a backward has freed
