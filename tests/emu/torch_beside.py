"""Torch of the CPU in the place of torch on a GPU: its tensors and streams beside the engine's.

An operation of torch waits for torch's current stream, a stream of the emulated device, and then
runs at once. So it sees what the engine had put on that very stream, as it would on a GPU, and of
what the engine does elsewhere without order it sees what happens to be done: too little, as a rule,
with delays.

Memory of a GPU's tensors goes back in the order of their stream; here it is kept until the end of
:meth:`Gpu.stream`, or the process. What torch lends for gradients and unsharded parameters is
memory of the engine's, filled with NaN when torch has it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import foreign
import torch
from foreign import CPU, CUDA, relabel
from torch.utils._python_dispatch import TorchDispatchMode

import fsdpc
from fsdpc import _core
from fsdpc.torch import _device


class InOrder(TorchDispatchMode):
    """Lets operations run behind what torch's current stream holds."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gpu.runtime.synchronize(self.gpu.current)
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.gpu.memory.append(each.untyped_storage())
        return result


class Gpu:
    """The emulated GPU as the engine's device, and torch's current stream on it."""

    def __init__(self) -> None:
        fsdpc.set_default_device("cuda")
        self.runtime = foreign.Runtime()
        self.current = self.runtime.stream()
        self.memory: list[torch.UntypedStorage] = []
        self.told: Callable[[], int] = lambda: self.current
        _device.home = lambda: torch.device("cpu")
        _device.raw_stream = lambda: self.told()
        _device._over = self._over
        _device._under = lambda t: _core.from_dlpack(relabel(t.__dlpack__(), CUDA))
        _device.like = lambda m: self._over(fsdpc.zeros(m.shape, dtype=m.dtype))
        _device.grad_memory = lambda unit, _: [self._over(m) for m in _core.grad_memory(unit)]
        _device.Lent.take = lambda lent: lent.storage.data_ptr()
        _device.Lent.give = lambda lent: self._spoil(lent.storage)
        InOrder(self).__enter__()

    def _over(self, memory: Any) -> torch.Tensor:
        capsule = memory.__dlpack__(stream=self.current, max_version=(1, 0))
        return torch.from_dlpack(relabel(capsule, CPU))

    def _spoil(self, storage: torch.UntypedStorage) -> None:
        self.runtime.fill(storage.data_ptr(), 0xff, storage.nbytes(), self.current)

    @contextmanager
    def stream(self, handle: int) -> Iterator[None]:
        """Make another stream torch's current one, as a program does that orders both itself."""
        before, self.current = self.current, handle
        self.runtime.synchronize(before)
        yield
        self.runtime.synchronize(handle)
        self.current = before
        self.memory.clear()

    @contextmanager
    def unjoined(self) -> Iterator[None]:
        """Let the engine stay on the stream that it is on: the order points are gone."""
        stays = _core.stream_handle()
        self.told = lambda: stays
        yield
        self.told = lambda: self.current
