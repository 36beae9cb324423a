"""Where units live, as torch names it, and how its tensors and streams meet the engine's.

On the CPU that is all. On a GPU kernels run behind their callers, torch's on its current stream. So
wherever torch hands over to the engine, the engine's main stream becomes that one (:func:`join`;
TorchUnit does it by itself, in backward's threads too). Both libraries' work runs in one order, and
neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fsdpc import _core, device

_over: Callable[[_core.Tensor], torch.Tensor] = torch.from_dlpack
_under: Callable[[torch.Tensor], _core.Tensor] = _core.from_dlpack


def on_cpu() -> bool:
    """Whether the engine computes on the CPU."""
    return _core.device_name() == "cpu"


def home() -> torch.device:
    """Return the device of every piece and full."""
    return torch.device("cpu") if on_cpu() else torch.device("cuda", _core.device_ordinal())


def raw_stream() -> int:
    """Return the handle of torch's current stream on the engine's GPU."""
    return torch._C._cuda_getCurrentRawStream(_core.device_ordinal())


def streams() -> Callable[[], int] | None:
    """Return what tells torch's current stream; None where there are none."""
    return None if on_cpu() else raw_stream


def join() -> None:
    """Let what the engine is asked next run in the order of torch's current stream."""
    if not on_cpu():
        _core.adopt_stream(raw_stream())


def to_torch(memory: _core.Tensor) -> torch.Tensor:
    """Return a tensor of torch over the engine's memory."""
    return _over(memory)


def to_engine(t: torch.Tensor) -> _core.Tensor:
    """Return a tensor of the engine over torch's memory; over a copy of what is elsewhere."""
    join()
    at = home()
    return _under(t if t.device == at else t.to(at))


def choose(params: Sequence[tuple[str, nn.Parameter]], asked: str | None = None) -> None:
    """Raise unless parameters are where the engine computes, which a first unit on a GPU decides.

    Parameters
    ----------
    params : sequence of (str, Parameter)
        Of one unit, by name; those on the meta device fit anywhere.
    asked : str, optional
        A type of device that the user named (a mesh's), which decides too.

    Raises
    ------
    ValueError
        They are on several devices, or on another than the engine; says what to call.
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
        _core.set_reclaim(torch.cuda.empty_cache)  # it keeps what a backward has freed
