"""DLPack between the engine on the emulated device and another library on it."""

from __future__ import annotations

import pytest
from processes import printed

START = """
import ctypes, sys, threading
import numpy as np
import fsdpc
from fsdpc import _core
import foreign
from foreign import CPU, CUDA, relabel
"""

ON_CUDA = START + """
fsdpc.set_default_device("cuda")
cuda = foreign.Runtime()
"""


def lines(environment: dict[str, str], program: str) -> list[str]:
    """What a program prints beside an emulated GPU whose memory the host may touch."""
    return printed(environment, "-c", program, EMU_OPEN="1").splitlines()


def test_a_consumer_sees_what_was_computed(environment: dict[str, str]) -> None:
    """Its stream waits for ours; with -1 it does not, and reads what was there before."""
    out = lines(environment, ON_CUDA + """
values = np.arange(1000, dtype=np.float32)
for stream, read in ((cuda.stream(), "new"), (1, "new"), (None, "new"), (-1, "old")):
    t = fsdpc.tensor(values)
    held = cuda.block(_core.stream_handle())
    t += 1
    capsule = t.__dlpack__(stream=stream, max_version=(1, 0))
    reader = stream if stream and stream > 2 else 1 if stream != -1 else cuda.stream()
    copied = (ctypes.c_float * 1000).from_address(cuda.pinned(4000))
    cuda.copy(ctypes.addressof(copied), t.data_ptr, 4000, reader)
    if stream == -1:
        cuda.synchronize(reader)
    held.set()
    cuda.synchronize(reader)
    assert list(copied) == (values + (read == "new")).tolist(), (stream, copied[:3])
    array = np.from_dlpack(type("Labelled", (), {
        "__dlpack__": lambda self, **_: relabel(capsule, CPU),
        "__dlpack_device__": lambda self: (CPU, 0)})())
    _core.synchronize()
    assert array.ctypes.data == t.data_ptr and array[0] == 1
print(t.__dlpack_device__())
""")
    assert out == ["(2, 0)"]


def test_a_producer_is_told_our_stream(environment: dict[str, str]) -> None:
    """It is not copied, and given back when our stream has read it."""
    out = lines(environment, ON_CUDA + """
log = []

class Source:
    def __init__(self, array):
        self.array = array
    def __dlpack_device__(self):
        return (CUDA, 0)
    def __dlpack__(self, stream=None, max_version=None):
        log.append(("stream", stream == (_core.stream_handle() or 1)))
        return relabel(self.array.__dlpack__(), CUDA)

class Watched(np.ndarray):
    def __del__(self):
        log.append("given back")

for adopted in (None, cuda.stream(), 0):
    if adopted is not None:
        _core.adopt_stream(adopted)
    array = np.arange(6, dtype=np.float32).view(Watched)
    t = _core.from_dlpack(Source(array))
    assert t.data_ptr == array.ctypes.data and (t * 2).tolist() == [0, 2, 4, 6, 8, 10]
    log.clear()
    held = cuda.block(_core.stream_handle())
    y = t * 3
    cuda.submit(lambda: log.append("read"), _core.stream_handle())
    del array
    threading.Thread(target=held.set).start()
    del t
    assert log == ["read", "given back"], log
    assert y.tolist() == [0, 3, 6, 9, 12, 15]
log.clear()
strided = _core.from_dlpack(Source(np.arange(6.0).reshape(2, 3).T))
print(log, strided.tolist(), strided.device)
""")
    assert out == ["[('stream', True)] [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] cuda"]


@pytest.mark.parametrize("start, attempt, error", [
    (ON_CUDA, "fsdpc.from_dlpack(np.ones(2))",
     "BufferError: from_dlpack: memory of the CPU, and this process computes on cuda:0: "
     "fsdpc.tensor(array) copies it there"),
    (ON_CUDA, "_core.from_dlpack(relabel(np.ones(2).__dlpack__(), CUDA, 1))",
     "BufferError: from_dlpack: memory of cuda:1, and this process computes on cuda:0: copy it "
     "there first"),
    (ON_CUDA, "_core.from_dlpack(relabel(np.ones(2).__dlpack__(), 8))",
     "BufferError: from_dlpack: memory of DLPack's device type 8, and this process computes on "
     "cuda:0: copy it there first"),
    (START, "_core.from_dlpack(relabel(np.ones(2).__dlpack__(), CUDA))",
     "BufferError: from_dlpack: memory of cuda:0, and this process computes on the CPU: copy it "
     "to the host first, or call fsdpc.set_default_device(\"cuda\") before anything else"),
    (ON_CUDA, "fsdpc.tensor([1.0]).__dlpack__(dl_device=(1, 0))",
     "BufferError: __dlpack__: the tensor is on cuda:0, and memory of device type 1, ordinal 0 is "
     "asked for: numpy() copies to the host"),
    (ON_CUDA, "fsdpc.tensor([1.0]).__dlpack__(stream=0)",
     "ValueError: __dlpack__(stream=0): -1, 1 and 2 for CUDA's default streams, or the handle"),
])
def test_what_cannot_be_shared_is_named(environment: dict[str, str], start: str, attempt: str,
                                        error: str) -> None:
    out = lines(environment, f"""{start}
try:
    {attempt}
except Exception as e:
    print(f"{{type(e).__name__}}: {{e}}")
""")
    assert len(out) == 1 and out[0].startswith(error), out
