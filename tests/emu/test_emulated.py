"""The GPU's kernels on the emulated device, against the CPU's, in both orders of threads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600

pytestmark = pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed")


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    """The tests of tests/gpu as programs for this processor, by name."""
    done = subprocess.run([sys.executable, "tools/cuda_build.py", "--emulate"], cwd=ROOT,
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    paths = [Path(line) for line in done.stdout.splitlines() if line]
    return {path.name: path for path in paths}


@pytest.mark.parametrize("name", ["test_flat_kernels", "test_step_kernels", "test_nn_kernels",
                                  "test_attention_kernels", "test_device_cuda",
                                  "test_nccl_load"])
def test_it_agrees_with_the_cpu(programs: dict[str, Path], name: str) -> None:
    done = subprocess.run([programs[name]], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout, done.stdout
