"""The engine on the emulated device, against the engine on the CPU.

Device memory of the emulated plugin is out of the host's reach (emu_gate.h), so a program that ends
well never looked at a tensor but through a copy.
"""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import EMULATION_ALONE, printed, run


def lines(environment: dict[str, str], program: str) -> list[str]:
    """Return what a program on the emulated GPU prints."""
    start = "import numpy as np, fsdpc\nfsdpc.set_default_device('cuda')\n"
    return printed(environment, "-c", start + program).splitlines()


@pytest.fixture(scope="module")
def trained(environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What training.py prints on each device."""
    program = Path(__file__).with_name("training.py")
    return {device: json.loads(printed(environment, program, device))
            for device in ("cpu", "cuda")}


# Products and sums over rows add up in another order, in fp32; AdamW's quotient amplifies that
# where gradients are small, and bf16 rounds either side of a midpoint.
@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-4), ("bf16", 2e-2)])
@pytest.mark.parametrize("name", ["llama", "perceptron", "qlora", "muon", "muon-bf16"])
def test_training_agrees_with_the_cpu(trained: dict[str, dict[str, Any]], name: str, dtype: str,
                                      tolerance: float) -> None:
    cpu, cuda = (trained[device][f"{name} {dtype}"] for device in ("cpu", "cuda"))
    tolerance = max(tolerance, 2e-3 if name == "muon-bf16" else 0)
    for what in ("losses", "norms", "values"):
        np.testing.assert_allclose(cuda[what], cpu[what], rtol=tolerance, atol=tolerance)
    assert all(after < before for before, after in zip(cuda["losses"], cuda["losses"][1:],
                                                       strict=False))
    assert cuda["norms"][0] > 0.5, "nothing was clipped"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["weighted", "coded", "factored"])
def test_given_gradients_the_weights_have_the_cpu_s_bits(trained: dict[str, dict[str, Any]],
                                                         name: str, dtype: str) -> None:
    """Reduction, norm, clipping, AdamW, block codes and publishing promise bits."""
    cpu, cuda = (trained[device][f"{name} {dtype}"] for device in ("cpu", "cuda"))
    assert cuda["norms"] == cpu["norms"] and cuda["values"] == cpu["values"]
    assert cuda["norms"][0] > 0.5, "nothing was clipped"


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_a_captured_step_is_refused(environment: dict[str, str], kind: str) -> None:
    out = lines(environment, f"""
from fsdpc import nn, optim
model = fsdpc.fully_shard(nn.Linear(8, 8, bias=False))
optimizer = optim.{kind}(model.parameters())
def step():
    model(fsdpc.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
try:
    with fsdpc.graph_step(model, optimizer):
        step()
except NotImplementedError as refused:
    print(refused)
step()
""")
    assert len(out) == 1 and "a captured step cannot contain optimizers" in out[0]


def test_the_host_cannot_touch_device_memory(environment: dict[str, str]) -> None:
    """Else the tests above would show nothing."""
    program = ("import ctypes, fsdpc; fsdpc.set_default_device('cuda'); t = fsdpc.tensor([1.0]); "
               "print(t.item(), flush=True); ctypes.string_at(t.data_ptr, 4)")
    done = run(environment, "-c", program)
    assert done.stdout == "1.0\n" and done.returncode == -signal.SIGSEGV, done


def test_values_go_in_and_out(environment: dict[str, str]) -> None:
    out = lines(environment, """
a = np.arange(6, dtype=np.float64).reshape(2, 3)
t = fsdpc.from_numpy(a)
a[:] = 0                                   # a copy: the tensor keeps what it was given
print(t.numpy().tolist(), t.tolist(), t[1, 2].item(), fsdpc.tensor(7).numpy().shape)
print(t, fsdpc.tensor([1.5], dtype=fsdpc.bfloat16), (fsdpc.tensor([1, 2]) + 3).tolist())
full, count = fsdpc._core.full((2,), 2.5), fsdpc._core.arange(1, 7, 2)
print(full.tolist(), count.tolist(), fsdpc._core.array_equal(t, t.clone()),
      fsdpc._core.array_equal(t, t + 1), fsdpc._core.zeros(0, 3).numpy().shape)
print(fsdpc.get_default_device(), fsdpc.show_config(print_=False)["nn_kernels"],
      fsdpc.all_reduce(3.0), fsdpc.all_gather(np.ones(2)).shape, fsdpc.broadcast(5))
""")
    assert out == [
        "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] 5.0 ()",
        "tensor([[0., 1., 2.],", "        [3., 4., 5.]], dtype=float64) "
        "tensor([1.5], dtype=bfloat16) [4, 5]",
        "[2.5, 2.5] [1, 3, 5] True False (0, 3)",
        "cuda cuda 3.0 (1, 2) 5",
    ]


@pytest.mark.parametrize("attempt, error", [
    ("memoryview(fsdpc.tensor([1.0]))",
     "BufferError: the tensor's memory is on device 'cuda', out of the host's reach: numpy() "
     "copies it"),
    pytest.param(
        "import torch, fsdpc.torch; fsdpc.torch.use_kernels(torch.nn.Linear(2, 2))(torch.ones(2))",
        "NotImplementedError: a product of torch's tensors on device 'cuda' is not supported yet",
        marks=pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")),
    ("fsdpc.tensor(1); fsdpc.set_default_device('cpu')",
     "RuntimeError: tensors live on device 'cuda' already: choose the device before the first"),
    ("fsdpc.functional.embedding(fsdpc.tensor([9]), fsdpc.tensor([[1.0]])).numpy()",
     "IndexError: id 9 at index 0 of an embedding of 1 rows"),
])
def test_what_the_device_cannot_do_is_named(environment: dict[str, str], attempt: str,
                                            error: str) -> None:
    out = lines(environment, f"""
try:
    {attempt}
except Exception as e:
    print(f"{{type(e).__name__}}: {{e}}")
""")
    assert len(out) == 1 and out[0].startswith(error), out


CHECKPOINT = """
import sys
import numpy as np, fsdpc
device, wanted, path = sys.argv[1:]
fsdpc.set_default_device(device)
fsdpc.manual_seed({"save": 1, "load": 2}[wanted])
model = fsdpc.nn.Linear(6, 4)
fsdpc.fully_shard(model)
optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
if wanted == "load":
    fsdpc.checkpoint.load(path, state)
else:
    model(fsdpc.tensor(np.ones((2, 6), np.float32))).sum().backward()
    optimizer.step()
    fsdpc.checkpoint.save(path, state)
fsdpc.checkpoint.save(path + device + wanted, state, async_=True).wait()
print([fsdpc.full_tensor(p).tolist() for p in model.parameters()])
"""


def test_generation_has_the_cpu_s_tokens(environment: dict[str, str]) -> None:
    """Through the cache, masks of unequal prompts and windows, norms of heads."""
    program = (
        "from fsdpc.models import GPT2, Llama, ModelConfig\n"
        "sizes = dict(vocab_size=61, dim=32, layers=2, heads=4, inner=48, max_seq=40)\n"
        "more = dict(kv_heads=2, qk_norm=True, qkv_bias=True, sliding_window=3)\n"
        "for kind, own in ((Llama, more), (GPT2, {})):\n"
        "    fsdpc.manual_seed(4)\n"
        "    model = kind(ModelConfig(**sizes, **own))\n"
        "    state = model.state_dict()\n"
        "    large = {n: t.numpy() * (12 if t.ndim == 2 else 1) for n, t in state.items()}\n"
        "    model.load_state_dict(large)\n"
        "    for row in model.generate([[3, 1, 4, 1, 5], [9, 2], [6]], 8): print(row.tolist())\n"
    )
    found = lines(environment, program)
    assert found == printed(environment, "-c", "import fsdpc\n" + program).splitlines()
    assert len(found) == 6 and len(set(found)) == 6


def test_checkpoints_go_between_devices(environment: dict[str, str], tmp_path: Path) -> None:
    """Weights and states, by a copy in host memory: saved, and loaded on either device."""
    path = str(tmp_path / "run-")
    outputs = []
    for device, wanted in (("cuda", "save"), ("cpu", "load"), ("cuda", "load")):
        outputs.append(printed(environment, "-c", CHECKPOINT, device, wanted, path))
    assert outputs[0] == outputs[1] == outputs[2]
    saved = [{file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
             for folder in tmp_path.iterdir()]
    assert len(saved) == 4 and saved[0] and all(files == saved[0] for files in saved)


STAGED = """
import os
import numpy as np, fsdpc
fsdpc.set_default_device("cuda")
model = fsdpc.nn.Linear(1000, 1000, bias=False)
fsdpc.fully_shard(model)
before = fsdpc.memory_stats()
handle = fsdpc.checkpoint.save(os.environ["FOLDER"], {"model": model}, async_=True)
during = fsdpc.memory_stats()
handle.wait()
after = fsdpc.memory_stats()
print([during[kind] - before[kind] for kind in ("pinned_bytes", "other_bytes")])
print(after["pinned_bytes"] - before["pinned_bytes"])
"""


def test_a_save_beside_training_copies_once(environment: dict[str, str], tmp_path: Path) -> None:
    """To pinned memory, which is given back at its end; the thread writes from there."""
    out = printed(environment, "-c", STAGED, FOLDER=str(tmp_path / "run"))
    assert out.splitlines() == ["[4000000, 0]", "0"]


def test_the_command_trains(environment: dict[str, str], tmp_path: Path) -> None:
    text, metrics = tmp_path / "text.py", tmp_path / "metrics.jsonl"
    text.write_text("def train(model):\n    return model.step()\n" * 40)
    out = printed(environment, "-m", "fsdpc", "train", "--device", "cuda", "--steps", "2",
                  "--batch", "1", "--seq", "8", "--sample", "2", "--data", text, "--metrics",
                  metrics)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [5 < step["loss"] < 6 for step in steps[:2]] == [True, True] and "sample" in out


OUT_OF_MEMORY = """
import sys
import numpy as np, fsdpc
from fsdpc import nn

fsdpc.set_default_device("cuda")
model = nn.Linear(1024, 1024)
fsdpc.fully_shard(model)
x = np.zeros((int(sys.argv[1]), 1024), np.float32)
try:
    model(fsdpc.tensor(x))
except MemoryError as error:
    print(error)
model = nn.Linear(8, 8)
fsdpc.fully_shard(model)
print(model(fsdpc.tensor(x[:1, :8])).shape)  # whoever caught it goes on
"""


@EMULATION_ALONE
@pytest.mark.parametrize("rows, limit, wanted", [
    (1, 17 << 20, ["(unsharded)", "holds master 4198400, grad", "A rank is to hold", "total "]),
    (4096, 45 << 20, ["(activation)", "holds unsharded 4198400, master"]),
], ids=["units", "activations"])
def test_what_does_not_fit_is_refused_with_what_is_held(
    environment: dict[str, str], rows: int, limit: int, wanted: list[str]
) -> None:
    out = printed(environment, "-c", OUT_OF_MEMORY, str(rows), EMU_MEMORY_BYTES=str(limit))
    assert f" of {limit} are free" in out, out
    assert [word for word in wanted if word not in out] == [], out
    assert out.endswith("(1, 8)\n")


RECLAIMED = """
import numpy as np, fsdpc, foreign
from fsdpc import _core
fsdpc.set_default_device("cuda")
x = fsdpc.tensor(np.zeros(4, np.float32))
cuda = foreign.Runtime()
kept, asked = [cuda.memory(24 << 20)], []

def give_back():
    asked.append(len(kept))
    while kept:
        cuda.free(kept.pop())
    if len(asked) == 2:
        raise ValueError("nothing to give")

def attempt(n):
    try:
        return fsdpc.tensor(np.ones(n << 18, np.float32)).sum().item()
    except MemoryError as error:
        return str(error)[:20]

print(attempt(8))  # nobody is asked
_core.set_reclaim(give_back)
print(attempt(8), asked)  # another library's 24 MiB make room
print(attempt(64), asked)  # more than there is: asked once, whose failure is shown
_core.set_reclaim(None)
print(attempt(64), asked)
"""


@EMULATION_ALONE
def test_other_libraries_are_asked_for_memory_that_they_keep(environment: dict[str, str]) -> None:
    done = run(environment, "-c", RECLAIMED, EMU_MEMORY_BYTES=str(32 << 20))
    none = "no device memory for"
    assert done.stdout.splitlines() == [none, "2097152.0 [1]", f"{none} [1, 0]", f"{none} [1, 0]"]
    assert "ValueError: nothing to give" in done.stderr


CLIPPING = """
import sys
import numpy as np, fsdpc
from fsdpc import nn
fsdpc.set_default_device(sys.argv[1])

class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(fsdpc.tensor(np.ones(1000, np.float32)))

    def forward(self, x):  # gradients are x, to the bit
        return (self.w * fsdpc.tensor(x)).sum()

x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
for sharded in (False, True):
    model = Weighted()
    if sharded:
        fsdpc.fully_shard(model)
    for bad in (None, np.nan, np.inf):
        batch = x.copy()
        batch[7] = x[7] if bad is None else bad
        for p in (1, 2, 3, float("inf")):
            model(batch).backward()
            norms = [fsdpc.clip_grad_norm_(model, limit, p) for limit in (1e9, 0.5, 0.25)]
            fsdpc.clip_grad_norm_(model, 0.125)  # not measured again before it is read
            grad = model.w.grad.numpy()
            print(sharded, bad, p, [float(norm).hex() for norm in norms], norms[0].dtype,
                  norms[0].shape, grad.tobytes().hex() if bad is None else grad[:9].tolist(),
                  fsdpc.grad_norms(model, p))
            model.zero_grad()
    try:
        model(batch).backward()
        fsdpc.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    except FloatingPointError as error:
        print(error)
    model.zero_grad()
"""


def test_clipping_has_the_cpu_s_bits(environment: dict[str, str]) -> None:
    """Norms of every kind and what they leave of gradients, in units and outside, clipped again
    and again before anybody looks."""
    outputs = [printed(environment, "-c", CLIPPING, device).splitlines()
               for device in ("cpu", "cuda")]
    assert len(outputs[0]) == 26 and outputs[1] == outputs[0]


def test_an_estimate_leaves_the_device_to_be_chosen(environment: dict[str, str]) -> None:
    program = ("import fsdpc; fsdpc.estimate(params=1e9, world=8, device='cuda'); "
               "fsdpc.set_default_device('cuda'); print(fsdpc.tensor([1.0]).item())")
    assert printed(environment, "-c", program) == "1.0\n"
