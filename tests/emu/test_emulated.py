"""The GPU's kernels on the emulated device, against the CPU's, in both orders of threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TIMEOUT_S = 600

pytestmark = pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed")


@pytest.mark.parametrize("name", ["test_flat_kernels", "test_step_kernels", "test_norm_kernels",
                                  "test_nn_kernels",
                                  "test_attention_kernels", "test_device_cuda", "test_graph",
                                  "test_nccl_load", "test_comm_nccl", "test_nccl_faults",
                                  "test_streams", "test_comm_local_cuda", "test_windows",
                                  "test_engine_windows"])
def test_it_agrees_with_the_cpu(emulated: dict[str, Path], name: str) -> None:
    done = subprocess.run([emulated[name]], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout, done.stdout
