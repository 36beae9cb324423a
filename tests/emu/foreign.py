"""Another library beside the engine on the emulated device: its streams, and DLPack's structs.

Run with EMU_OPEN=1, so that the host may look at device memory: arrays of NumPy and torch's
tensors of the CPU stand for tensors of a GPU, once their capsules say so.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

CPU, CUDA = 1, 2

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


class _Versioned(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor))


def relabel(capsule: Any, kind: int, ordinal: int = 0) -> Any:
    """Return a capsule whose tensor says now that it is on this device."""
    name = _api.PyCapsule_GetName(capsule)
    address = _api.PyCapsule_GetPointer(capsule, name)
    tensor = (_Versioned.from_address(address).tensor if name.endswith(b"versioned")
              else _Tensor.from_address(address))
    tensor.device.type, tensor.device.id = kind, ordinal
    return capsule


class Runtime:
    """CUDA's runtime, of which the emulated plugin has a copy."""

    def __init__(self) -> None:
        self.symbols = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"])
        self._kept: list[Any] = []

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self.symbols, name)(*args)
        assert error == 0, f"{name}: {error}"

    def stream(self) -> int:
        """Return the handle of a new stream."""
        handle = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(handle), 1)
        return handle.value or 0

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def copy(self, to: int, source: int, n_bytes: int, stream: int) -> None:
        """Enqueue a copy."""
        self._call("cudaMemcpyAsync", ctypes.c_void_p(to), ctypes.c_void_p(source),
                   ctypes.c_size_t(n_bytes), 4, ctypes.c_void_p(stream))

    def memory(self, n_bytes: int) -> int:
        """Return the address of device memory."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(n_bytes))
        return address.value or 0

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def pinned(self, n_bytes: int) -> int:
        """Return the address of host memory that copies do not wait for."""
        address = ctypes.c_void_p()
        self._call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(n_bytes), 1)
        return address.value or 0

    def fill(self, address: int, byte: int, n_bytes: int, stream: int) -> None:
        """Let a stream set bytes."""
        self._call("cudaMemsetAsync", ctypes.c_void_p(address), byte, ctypes.c_size_t(n_bytes),
                   ctypes.c_void_p(stream))

    def submit(self, function: Callable[[], Any], stream: int) -> None:
        """Let a stream call a function."""
        called = _HOST_FUNCTION(lambda _: function() and None)
        self._kept.append(called)
        self._call("cudaLaunchHostFunc", ctypes.c_void_p(stream), called, None)

    def block(self, stream: int) -> threading.Event:
        """Stop a stream until the event is set."""
        event = threading.Event()
        self.submit(event.wait, stream)
        return event

    def delays(self, seed: int) -> None:
        """Delay all work of streams at random; 0: no longer."""
        self.symbols.emu_set_delays(seed)
