"""benchmarks/bench_gpu.py: its counts of FLOPs, and that it runs where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdpc.models.config import preset

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
import bench_gpu  # noqa: E402

TIMEOUT_S = 300


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


def test_it_runs_on_the_cpu() -> None:
    command = [sys.executable, "benchmarks/bench_gpu.py", "--shapes", "2M", "--engines", "native"]
    done = subprocess.run([*command, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True,
                          timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "| 2M | native | " in done.stdout and "TFLOP/s" in done.stdout
