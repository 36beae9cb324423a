"""benchmarks/bench_gpu.py: its counts of FLOPs, and that it runs where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdpc.models.config import preset

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
import bench_gpu  # noqa: E402

TIMEOUT_S = 300
NEEDS_TORCH = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


def test_the_study_s_count() -> None:
    config, h100 = preset("SmolLM3-3B"), 989e12
    each = bench_gpu.published_flops_per_token(config, 8192)
    assert each == pytest.approx(24.12e9, rel=1e-3)
    # The study's own rows on 4 H100: 8,415 tokens/s a GPU are 20.5 %, 8,214 are 20.0 %.
    assert round(8415 * each / h100, 3) == 0.205 and round(8214 * each / h100, 3) == 0.200


def test_a_row() -> None:
    found = {"seconds": [0.5, 0.25, 0.125], "peak_bytes": 3 << 30}
    cells = bench_gpu.row("native", "125M", found, peak=989e12, reached=494.5e12)
    tokens = 16 * 2048 / 0.25
    share = tokens * preset("125M").flops_per_token(2048) / 989e12
    assert cells[3] == f"{tokens:,.0f}" and cells[-1] == "3.0"
    assert cells[4:6] == [f"{share:.1%}", f"{2 * share:.1%}"]


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """bench_gpu.py on the smallest model and the CPU."""
    command = [sys.executable, "benchmarks/bench_gpu.py", "--shapes", "2M", "--device", "cpu"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=TIMEOUT_S, env={**os.environ, **environment})


@NEEDS_TORCH
def test_it_runs_on_the_cpu() -> None:
    without = {"FSDPC_CUDA_PLUGIN": "/nowhere/libfsdpc_cuda.so"}
    done = bench("--engines", "native", "native+graph+cudnn1", **without)
    assert done.returncode == 0, done.stderr
    assert "| 2M | native | " in done.stdout and "TFLOP/s" in done.stdout
    assert "no engine on cuDNN's attention; the plugin: not built" in done.stdout
    assert "| 2M | native+graph+cudnn1 |" not in done.stdout


@NEEDS_TORCH
def test_an_engine_that_fails_or_hangs_keeps_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = bench("--engines", "native", FSDPC_THREADS="many")
    assert done.returncode == 1
    assert "| 2M | native | failed: exit 1: ValueError: FSDPC_THREADS='many'" in done.stdout
    assert done.stderr.splitlines()[-1] == "1 measurements failed"
    hang = tmp_path / "hang.py"
    hang.write_text("import faulthandler, sys, time\n"
                    "faulthandler.dump_traceback_later(float(sys.argv[-1]) - 1)\n"
                    "time.sleep(600)\n")
    monkeypatch.setattr(bench_gpu, "__file__", str(hang))
    with pytest.raises(RuntimeError, match="failed: cut off after 2 s"):
        bench_gpu.run_alone([], 2)
    assert 'hang.py", line 3' in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="not run"):
        bench_gpu.measure("native", "2M", [], 1)


@pytest.mark.parametrize("plugin, kept", [
    ("CUDA 13.0, attention by cuDNN 9.28.1", ["fsdp2", "native+graph+cudnn1"]),
    ("CUDA 13.0, attention by our kernels (no cuDNN: libcudnn.so.9)", ["fsdp2"]),
])
def test_cudnn_s_engine_runs_where_the_plugin_has_it(
    monkeypatch: pytest.MonkeyPatch, plugin: str, kept: list[str]
) -> None:
    monkeypatch.setattr(bench_gpu.common, "plugin_says", lambda: (plugin, "NCCL 2.28.9"))
    assert bench_gpu.without_cudnn(["fsdp2", "native+graph+cudnn1"]) == kept
    monkeypatch.setattr(bench_gpu, "run_alone", lambda *_, **environment: environment)
    assert bench_gpu.measure("native+graph+cudnn1", "2M", [], 60) == {"FSDPC_CUDNN": "1"}
    assert bench_gpu.measure("native", "2M", [], 60) == {}


FORWARD = """
import sys
sys.path[:0] = ["benchmarks"]
import bench_gpu, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Reads(TorchDispatchMode):  # what a GPU would be waited for
    count = 0
    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        Reads.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*arguments, **(options or {}))

model, _ = bench_gpu.torch_llama("2M")
ids = torch.zeros((2, 8), dtype=torch.long)
for tell in (lambda: None, bench_gpu.expect_no_packed_sequences):
    tell()
    Reads.count = 0
    with Reads():
        logits = model(input_ids=ids).logits
    print(Reads.count, logits.sum().item())
import transformers.masking_utils as masks
del masks.find_packed_sequence_indices
bench_gpu.expect_no_packed_sequences()
assert not hasattr(masks, "find_packed_sequence_indices")
"""


@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
def test_transformers_reads_nothing_back_in_a_forward() -> None:
    done = subprocess.run([sys.executable, "-c", FORWARD], cwd=ROOT, capture_output=True,
                          text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    before, after = (line.split() for line in done.stdout.splitlines())
    assert int(after[0]) == 0 and after[1] == before[1], (before, after)


def test_the_baseline_is_first() -> None:
    assert bench_gpu.ENGINES[0] == "fsdp2"


@NEEDS_TORCH
def test_what_a_unit_costs_the_host_is_measured_on_the_cpu_too() -> None:
    command = [sys.executable, "benchmarks/bench_gpu_host.py", "--units", "1", "3"]
    done = subprocess.run([*command, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True,
                          timeout=TIMEOUT_S, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    rows = {line.split(" | ")[0][2:]: line for line in done.stdout.splitlines()[-5:]}
    assert {"torch", "fsdp2", "door", "native"} < set(rows), done.stdout
    assert "graph_step() needs device 'cuda'" in rows["native+graph"]
