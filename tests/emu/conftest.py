"""What tests of the emulated device share: the programs and the plugin, built once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 900


@pytest.fixture(scope="session")
def emulated() -> dict[str, Path]:
    """What tools/cuda_build.py --emulate builds, by name."""
    done = subprocess.run([sys.executable, "tools/cuda_build.py", "--emulate"], cwd=ROOT,
                          capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    paths = [Path(line) for line in done.stdout.splitlines() if line]
    return {path.name: path for path in paths}


@pytest.fixture(scope="session")
def environment(emulated: dict[str, Path]) -> dict[str, str]:
    """The environment of a Python process whose GPU is the emulated one; it imports from here."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "FSDPC_CUDA_PLUGIN": str(emulated["libfsdpc_cuda.so"]),
            "PYTHONPATH": os.pathsep.join(places)}
