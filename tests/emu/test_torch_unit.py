"""The torch frontend on the emulated device, against the same on the CPU.

Torch is the CPU's; torch_beside.py says how it stands for torch on a GPU. Products, and all that
a module computes, are torch's and the same on both sides. The engine's kernels beneath it
promise the CPU's bits, so everything is compared to the bit.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from processes import last_json, printed

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


def show(environment: dict[str, str], *arguments: str) -> str:
    """What Python prints beside an emulated GPU whose memory the host may touch."""
    return printed(environment, *arguments, EMU_OPEN="1")


@pytest.fixture(scope="module")
def trained(environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What torch_training.py prints on each device."""
    path = str(HERE / "torch_training.py")
    return {device: json.loads(show(environment, path, device)) for device in ("cpu", "cuda")}


def test_training_has_the_bits_of_the_cpu(trained: dict[str, dict[str, Any]]) -> None:
    cpu, cuda = trained["cpu"], trained["cuda"]
    assert cpu.keys() == cuda.keys() and len(cpu) > 12
    for name in cpu:
        assert cuda[name] == cpu[name], name
        assert all(norm > 0.05 for norm in cpu[name]["norms"]), f"{name}: nothing was clipped"


def test_training_is_that_of_plain_torch(trained: dict[str, dict[str, Any]]) -> None:
    for name in ("mlp", "transformer"):
        ours, plain = trained["cuda"][name], trained["cuda"][f"plain {name}"]
        for what in ("losses", "norms"):
            assert ours[what] == pytest.approx(plain[what], rel=1e-5)


def test_two_ranks_have_the_bits_of_shared_memory(nccl: dict[str, str]) -> None:
    """On one GPU, which they share, each on batches of its own."""
    path = str(HERE / "torch_training.py")
    cpu, cuda = (last_json(nccl, path, device, "2", EMU_OPEN="1") for device in ("cpu", "cuda"))
    for ours, theirs in zip(cuda, cpu, strict=True):
        assert (ours.pop("transport"), theirs.pop("transport")) == ("nccl", "shm")
        assert ours.keys() == theirs.keys() and len(ours) == 6
        for name in ours:
            assert ours[name] == theirs[name], name
    assert cuda[0]["mlp"]["losses"] != cuda[1]["mlp"]["losses"]
    assert cuda[0]["mlp"]["values"] == cuda[1]["mlp"]["values"]


CLIPPING = """
import ctypes, os
import torch_beside
gpu = torch_beside.Gpu()
import torch
import fsdpc.torch
awaited, synchronize = [], gpu.runtime.synchronize   # by the stand-in for torch, before operations
gpu.runtime.synchronize = lambda stream: (awaited.append(stream), synchronize(stream))
model = fsdpc.torch.fully_shard(torch.nn.Linear(3, 4))
optimizer = fsdpc.torch.optim.AdamW(model.parameters())
waits = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"]).emu_waits
waits.restype = ctypes.c_ulonglong
for checked in (False, False, True):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    before = waits() - len(awaited)
    fsdpc.torch.clip_grad_norm_(model, 1e-2, error_if_nonfinite=checked)
    optimizer.step()
    print(waits() - len(awaited) - before)
"""


def test_clipping_and_a_step_do_not_wait_for_the_device(environment: dict[str, str]) -> None:
    """The first step makes states."""
    counts = [int(line) for line in show(environment, "-c", CLIPPING).splitlines()]
    assert counts[1] == 0 < counts[2]


ORDER = """
import threading
from contextlib import nullcontext
import torch_beside
gpu = torch_beside.Gpu()
import torch
from torch import nn
import fsdpc.torch
from fsdpc.torch import fully_shard
torch.manual_seed(1)
plain, x = nn.Linear(3, 4), torch.ones(2, 3)
policy = fsdpc.torch.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
model = fully_shard(nn.Linear(3, 4), mp_policy=policy)  # else a rank alone reads its masters
model.load_state_dict(plain.state_dict())
optimizer, other = (kind(m.parameters(), lr=0.1) for kind, m in (
    (fsdpc.torch.optim.SGD, model), (torch.optim.SGD, plain)))
def forward():
    return model(x), nn.functional.linear(*(t.bfloat16() for t in (x, plain.weight, plain.bias)))
def backward():
    for y in outputs:
        y.sum().backward()
    return model.weight.grad.to_local(), plain.weight.grad
def step():
    optimizer.step()
    other.step()
    return model.weight.data.to_local(), plain.weight.data
def written():                         # no phase waits for the device in the host after these
    plain.weight.data.mul_(3)
    model.load_state_dict(plain.state_dict())
def run_forward():
    global outputs
    outputs = forward()
def trained():
    run_forward()
    backward()
outputs = forward()
backward()
step()

for before, phase in ((written, forward), (run_forward, backward), (trained, step)):
    for joined in (True, False):
        optimizer.zero_grad()
        other.zero_grad()
        x = 2 * x
        before()
        engine = fsdpc._core.stream_handle()
        gpu.runtime.synchronize(engine)
        with nullcontext() if joined else gpu.unjoined():
            gpu.current = gpu.runtime.stream()
            held = gpu.runtime.block(engine)   # the stream that the engine was on is stopped
            if joined:
                threading.Thread(target=held.set).start()
            ours, theirs = phase()
            print(phase.__name__, joined, torch.equal(ours, theirs))
            held.set()
            gpu.runtime.synchronize(engine)

def backward_elsewhere():              # as torch's own threads do on a GPU
    with torch_beside.InOrder(gpu):
        backward()
    print("selected", gpu.runtime.symbols.emu_selected())
optimizer.zero_grad()
other.zero_grad()
run_forward()
thread = threading.Thread(target=backward_elsewhere)
thread.start()
thread.join()
print(torch.equal(model.weight.grad.to_local(), plain.weight.grad))
try:
    fully_shard(nn.Linear(3, 4), offload_policy=fsdpc.torch.CPUOffloadPolicy(False))
except NotImplementedError as e:
    print(e)
model = fully_shard(nn.Linear(3, 4), offload_policy=fsdpc.torch.CPUOffloadPolicy())
model(x).sum().backward()
try:
    torch.optim.SGD(model.parameters()).step()
except NotImplementedError as e:
    print(e)
from fsdpc.torch import CPUOffload, FullyShardedDataParallel
model = FullyShardedDataParallel(nn.Linear(3, 4), cpu_offload=CPUOffload(offload_params=True))
print(model._fsdpc_unit.offload)
"""


def test_each_phase_needs_its_order_point(environment: dict[str, str]) -> None:
    """With it the engine goes on behind its old stream, and torch behind the engine.

    Without it the engine stays where it was, and torch reads what was there before. A thread that
    runs backward selects the device.
    """
    assert show(environment, "-c", ORDER).splitlines() == [
        f"{phase} {joined} {joined}" for phase in ("forward", "backward", "step")
        for joined in (True, False)
    ] + [
        "selected 1", "True",
        "CPUOffloadPolicy(pin_memory=False): the GPU reads masters where they lie, so they are in "
        "pinned memory; leave pin_memory out",
        "SGD of torch.optim.sgd keeps its states on the GPU, and the offload_policy of rows 0:4 of "
        "'Linear.weight' (4, 3) has optimizer='host': use an optimizer of fsdpc.torch.optim, or "
        "leave optimizer out of the policy",
        "('host', False, True, True, True, 1.0)",
    ]


EARLY = """
import torch_beside
gpu = torch_beside.Gpu()
import torch
from torch import nn
from fsdpc.torch import MixedPrecisionPolicy, fully_shard
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.LayerNorm(8))
    for module in (model[1], model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    return model
usual, model = make(), make()
first, second = gpu.current, gpu.runtime.stream()
memory, held = [], []
def change(*_):                        # torch's stream, as the engine sees it; that one is stopped
    memory.extend(gpu.memory)          # what the norm's backward made
    gpu.told = lambda: second
    held.append(gpu.runtime.block(second))
model[2].register_full_backward_pre_hook(lambda *_: gpu.memory.clear())
model[1].register_full_backward_pre_hook(change)
x = torch.rand(4, 8)
for m in (usual, model):
    m(x).float().square().sum().backward()
for one in memory:                     # torch gives it to others, which write it on its stream
    gpu.runtime.fill(one.data_ptr(), 0xff, one.nbytes(), first)
held[0].set()
for stream in (second, first):
    gpu.runtime.synchronize(stream)
for name in ("1.weight", "2.weight", "2.bias"):
    print(*(m.get_parameter(name).grad.to_local().sum().item() for m in (usual, model)))
"""


def test_gradients_that_waited_are_read_on_their_stream(environment: dict[str, str]) -> None:
    """Torch's allocator gives their memory to others on it."""
    for line in show(environment, "-c", EARLY).splitlines():
        usual, ours = map(float, line.split())
        assert usual == ours != 0


WHERE = """
import fsdpc, torch
from types import SimpleNamespace
from fsdpc.torch import _device, fully_shard
def at(*places):
    return [(f"w{i}", SimpleNamespace(device=torch.device(place), is_meta=place == "meta"))
            for i, place in enumerate(places)]
def attempt(call, *args):
    try:
        call(*args)
    except Exception as e:
        print(f"{type(e).__name__}: {e}")
"""


def test_the_first_unit_chooses_the_device(environment: dict[str, str]) -> None:
    out = show(environment, "-c", WHERE + """
attempt(_device.choose, at("cuda:0", "meta", "cpu", "cuda:0"))
_device.choose(at("meta", "cuda:0"))
print(fsdpc.get_default_device(), _device.home())
attempt(fully_shard, torch.nn.Linear(2, 2))
attempt(_device.choose, at("cuda:1"))
""")
    assert out.splitlines() == [
        "ValueError: the parameters of one unit are on several devices ('w0' is on cuda:0, 'w2' is "
        "on cpu): move the module to one before fully_shard()",
        "cuda cuda:0",
        "ValueError: parameter 'weight' is on cpu, and the engine computes on cuda:0: "
        'model.to("cuda:0") before fully_shard()',
        "ValueError: parameter 'w0' is on cuda:1, and the engine computes on cuda:0: "
        'model.to("cuda:0") before fully_shard()',
    ]


def test_a_device_that_was_chosen_stays(environment: dict[str, str]) -> None:
    out = show(environment, "-c", WHERE + """
t = fsdpc.tensor([1.0])
attempt(_device.choose, at("cuda:0"))
attempt(_device.choose, at("meta"), "cuda")
_device.choose(at("cpu"))
""")
    assert len(out.splitlines()) == 2
    for line in out.splitlines():
        assert line.startswith(
            "ValueError: the module is to be sharded on a GPU, and the engine computes on the CPU: "
            'call fsdpc.set_default_device("cuda") before anything else of fsdpc (tensors live on '
            "device 'cpu' already")
