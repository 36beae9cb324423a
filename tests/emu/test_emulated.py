"""The GPU's kernels on the emulated device, against the CPU's, in both orders of threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TIMEOUT_S = 600
PROGRAMS = sorted(path.stem for path in (Path(__file__).parents[1] / "gpu").glob("test_*.c"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_agrees_with_the_cpu(emulated: dict[str, Path], name: str) -> None:
    done = subprocess.run([emulated[name]], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout, done.stdout
