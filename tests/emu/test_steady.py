"""What the host does in a steady training step of the engine on the emulated device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 300

pytestmark = pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed")


@pytest.fixture(scope="module")
def counted(environment: dict[str, str]) -> dict[str, dict[str, int]]:
    """What steady.py prints."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("steady.py"))],
                          env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "perceptron"])
def test_a_step_asks_for_no_memory(counted: dict[str, dict[str, int]], name: str,
                                   dtype: str) -> None:
    counts = counted[f"{name} {dtype}"]
    assert counts["allocations"] == 0 and counts["system_allocs"] == 0
    assert counts["made"] > 0, "the pool's calls are not counted"
    assert counts["read"] > 0, "a value was read without a wait: waits are not counted"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "perceptron"])
def test_a_step_does_not_wait(counted: dict[str, dict[str, int]], name: str, dtype: str) -> None:
    """Loss, backward, clipping, AdamW and zero_grad, until somebody reads a value."""
    counts = counted[f"{name} {dtype}"]
    assert counts["waits"] == 0 and counts["queries"] == 0
