"""benchmarks/bench_generate.py: it runs, and both engines generate the same tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
import bench_generate  # noqa: E402


def test_tokens_count_up_to_the_first_difference() -> None:
    ours = [[1, 1], [2, 2], [3, 3]]  # three tokens of two sequences
    theirs = [[1, 1], [2, 9], [3, 3]]
    assert bench_generate.same(ours, ours) == "6 of 6 new tokens are the same"
    assert bench_generate.same(ours, theirs) == "4 of 6 new tokens are the same"


def test_it_runs() -> None:
    options = "--presets 2M --dtypes fp32 --batches 2 --prompt 5 --new 4 --rounds 1"
    command = [sys.executable, "benchmarks/bench_generate.py", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    number = r"[\d.,e+]+"
    for engine, ratio in (("fsdpc", number), ("transformers", r"1\.00")):
        row = (rf"\| Llama 2M fp32 \| 2 \| {engine} \| {number} \(.*\) \| {ratio} \| "
               rf"{number} \(.*\) \| {ratio} \| {number} \|")
        assert re.search(row, done.stdout), done.stdout
    assert "2M fp32, batch 2: 8 of 8 new tokens are the same" in done.stdout
