"""DLPack between the engine on the emulated device and another library on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import printed, run

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

PRODUCER = ON_CUDA + """
log = []

class Source:
    def __init__(self, array):
        self.array = array
    def __dlpack_device__(self):
        return (CUDA, 0)
    def __dlpack__(self, stream=None, max_version=None):
        return relabel(self.array.__dlpack__(), CUDA)
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
    cuda.synchronize(_core.stream_handle())
    held = cuda.block(_core.stream_handle())
    t += 1
    capsule = t.__dlpack__(stream=stream, max_version=(1, 0))
    reader = stream if stream and stream > 2 else 1 if stream != -1 else cuda.stream()
    copied = (ctypes.c_float * 1000).from_address(cuda.pinned(4000))
    cuda.copy(ctypes.addressof(copied), t.data_ptr, 4000, reader)
    cuda.synchronize(reader) if stream == -1 else None
    held.set()
    cuda.synchronize(reader)
    assert list(copied) == (values + (read == "new")).tolist(), (stream, copied[:3])
    array = np.from_dlpack(type("Labelled", (), {
        "__dlpack__": lambda self, **_: relabel(capsule, CPU),
        "__dlpack_device__": lambda self: (CPU, 0)})())
    cuda.synchronize(_core.stream_handle())
    assert array.ctypes.data == t.data_ptr and array[0] == 1
print(t.__dlpack_device__())
""")
    assert out == ["(2, 0)"]


def test_a_producer_is_told_our_stream(environment: dict[str, str]) -> None:
    """It is not copied, and given back when our stream has read it."""
    out = lines(environment, PRODUCER + """
class Told(Source):
    def __dlpack__(self, stream=None, max_version=None):
        log.append(("stream", stream == (_core.stream_handle() or 1)))
        return super().__dlpack__()

class Watched(np.ndarray):
    def __del__(self):
        log.append("given back")

for adopted in (None, cuda.stream(), 0):
    if adopted is not None:
        _core.adopt_stream(adopted)
    array = np.arange(6, dtype=np.float32).view(Watched)
    t = _core.from_dlpack(Told(array))
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
strided = _core.from_dlpack(Told(np.arange(6.0).reshape(2, 3).T))
print(log, strided.tolist(), strided.device)
""")
    assert out == ["[('stream', True)] [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] cuda"]


LENT = PRODUCER + """
class Lent(np.ndarray):
    def __del__(self):
        log.append("given back")
        self[...] = 0

def source(values):
    values = np.asarray(values)
    place = (ctypes.c_char * values.nbytes).from_address(cuda.memory(values.nbytes))
    array = np.frombuffer(place, values.dtype).reshape(values.shape).view(Lent)
    array[...] = values
    return Source(array)

def lent(values):
    return _core.from_dlpack(source(values))
"""


def test_a_graph_keeps_what_it_reads(environment: dict[str, str]) -> None:
    """Whatever becomes of the tensors, replays read what the step has read."""
    out = lines(environment, LENT + """
import graphs

def train(in_a_graph):
    run = graphs.Run("perceptron")
    run.batch = [lent(t.numpy()) for t in run.batch]
    run.load = lambda: None
    run.eager(2)
    if in_a_graph:
        x = run.batch[0]
        with fsdpc.graph_step(run.model, run.optimizer) as step:
            run.made = run.body()
            run.batch = None
        run.note(*run.made)
        del x
        for _ in range(2):
            run.replay(step)
        del step
    else:
        run.eager(3)
        run.batch = None
    return run.outcome()

plain = train(in_a_graph=False)
assert log == ["given back"] * 2
log.clear()
graph = train(in_a_graph=True)
print(graph == plain, log, len(set(plain["losses"])))
""")
    assert out == ["True ['given back', 'given back'] 5"]


def test_what_a_graph_was_to_read_goes_back_if_there_is_none(environment: dict[str, str]) -> None:
    out = lines(environment, LENT + """
import graphs

run = graphs.Run("perceptron")
run.eager(2)
x, other = lent(run.batch[0].numpy()), source([1.0])
for attempt in (x.__dlpack__, lambda: _core.from_dlpack(other), lambda: float(x.sum())):
    print(graphs.attempt(lambda: graphs.captured(run, lambda run: attempt())))
    run.eager(1)
assert not log
del x
print(log)
""")
    *errors, log = out
    for error, start in zip(errors, (
            "RuntimeError: a stream of another library is to wait for the GPU inside a captured",
            "RuntimeError: from_dlpack() inside a captured step",
            "RuntimeError: the host asks for a value of the GPU"), strict=True):
        assert error.startswith(start), error
    assert log == "['given back']"


def test_memory_that_cannot_be_waited_for_stays(nccl: dict[str, str]) -> None:
    """Ctrl-C comes while two ranks that could wait for each other drop a tensor in use."""
    program = Path(__file__).with_name("ranks.py")
    done = run(nccl, program, "drop_what_is_in_use", "cuda", "2", EMU_OPEN="1")
    assert done.returncode == 0, done.stdout + done.stderr
    *notes, results = done.stdout.splitlines()
    assert json.loads(results) == [[True, []]] * 2
    assert sum("24 bytes of another library stay taken" in note for note in notes) == 2, notes


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
