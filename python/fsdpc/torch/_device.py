"""The device of units in torch's terms, and how its tensors and streams meet the engine's.

On the CPU there is nothing more to do. On a GPU kernels run after their callers return, torch's on
its current stream. Whenever torch hands over to the engine, that stream therefore becomes the
engine's main stream (:func:`join`; TorchUnit does this itself, also in backward's threads). Both
libraries' work then runs in one order, and neither waits for the other.
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
    """Return the device of every piece and full."""
    return torch.device("cpu") if on_cpu() else torch.device("cuda", _core.device_ordinal())


def raw_stream() -> int:
    """Return the handle of torch's current stream on the engine's GPU."""
    return torch._C._cuda_getCurrentRawStream(_core.device_ordinal())


def streams() -> Callable[[], int] | None:
    """Return a function that returns torch's current stream; None if there are no streams."""
    return None if on_cpu() else raw_stream


def join() -> None:
    """Order the engine's next work after that on torch's current stream."""
    if not on_cpu():
        _core.adopt_stream(raw_stream())


def to_torch(memory: _core.Tensor) -> torch.Tensor:
    """Return a torch tensor over the engine's memory."""
    return _over(memory)


def gathered(state: UnitState, index: int, what: bool | torch.Tensor) -> torch.Tensor:
    """Return a parameter (False), its gradient (True), or what has such rows; collective.

    The memory is torch's, since users keep the result. Torch's allocator often has free memory that
    was used before, such as that of the parameters before they were sharded. The engine's would be
    fresh, and the first touch of a fresh page costs several times its copy.
    """
    join()
    if isinstance(what, torch.Tensor):
        dtype, rows = what.dtype, to_engine(what)
    else:
        dtype, rows = state.pieces[index].dtype, what
        dtype = torch.promote_types(dtype, torch.float32) if what else dtype
    full = torch.empty(state.shapes[index], dtype=dtype, device=home())
    state.unit.collect(index, rows, to_engine(full))
    return full


def to_engine(t: torch.Tensor) -> _core.Tensor:
    """Return an engine tensor over torch's memory; over a copy if it is on another device."""
    join()
    at = home()
    return _under(t if t.device == at else t.to(at))


def takes_back() -> bool:
    """Return whether torch's allocator can use memory that is not needed for a while."""
    return not on_cpu()


def like(memory: _core.Tensor) -> torch.Tensor:
    """Return a tensor in torch's memory."""
    dtype = getattr(torch, memory.dtype.name)
    return torch.empty(memory.shape, dtype=dtype, device=home())


def grad_memory(unit: _core.Unit, masters: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return new memory for the gradient shards of a unit with these masters.

    None if a policy offloads them: then they are in the unit's own memory.
    """
    if unit.offload and unit.offload[4]:
        return None
    if not takes_back():
        return [_over(m) for m in _core.grad_memory(unit)]
    return [
        torch.empty_like(m, dtype=torch.promote_types(m.dtype, torch.float32))
        for m in masters[: unit.trained_groups]
    ]


class Lent:
    """Memory of torch's that the engine works in; the extension calls its methods."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.storage: torch.UntypedStorage = flat.untyped_storage()
        self.bytes: int = self.storage.nbytes()
        self.users: int | None = None  # before the first count

    def count_users(self) -> int:
        """Return how many tensors and Python objects refer to it."""
        return torch._C._storage_Use_Count(self.storage._cdata)

    @property
    def is_kept(self) -> bool:
        """Return whether it has more users than ``users``."""
        return self.users is not None and self.count_users() > self.users

    def take(self) -> int:
        """Return its address; torch may have given it another address meanwhile."""
        if self.storage.nbytes() != self.bytes:
            self.storage.resize_(self.bytes)
        return self.storage.data_ptr()

    def give(self) -> None:
        """Return the memory to torch; its tensors stay, without memory."""
        self.storage.resize_(0)


def choose(params: Sequence[tuple[str, nn.Parameter]], asked: str | None = None) -> None:
    """Raise unless parameters are on the engine's device; the first unit on a GPU determines it.

    Parameters
    ----------
    params : sequence of (str, Parameter)
        Parameters of one unit, by name; those on the meta device fit anywhere.
    asked : str, optional
        A device type that the user named (a mesh's), which also determines it.

    Raises
    ------
    ValueError
        They are on several devices, or not on the engine's; the error says what to call.
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
