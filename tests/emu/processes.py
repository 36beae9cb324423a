"""How tests of the emulated device build what they run, and run it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import ON_GPU

ROOT = Path(__file__).resolve().parents[2]
EMULATION_ALONE = pytest.mark.skipif(ON_GPU, reason="about the emulated device and its fakes")
BUILD_TIMEOUT_S = 3000  # minutes on cores that are free
TIMEOUT_S = 300
EnvironmentOf = Callable[[int | str], dict[str, str]]


def built(*options: str) -> dict[str, Path]:
    """What tools/cuda_build.py --emulate builds, by name."""
    if not shutil.which("clang++"):
        pytest.skip("clang++ is not installed")
    done = subprocess.run([sys.executable, "tools/cuda_build.py", "--emulate", *options], cwd=ROOT,
                          capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return {Path(line).name: Path(line) for line in done.stdout.splitlines() if line}


def run(environment: dict[str, str], *arguments: str | Path,
        **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, and with `more` in its environment."""
    done = subprocess.run([sys.executable, *arguments], env={**environment, **more},
                          capture_output=True, text=True, timeout=TIMEOUT_S)
    if ON_GPU and "KeyError: 'FSDPC_CUDA_PLUGIN'" in done.stderr:
        pytest.skip("asks the emulated device what it counted")
    return done


def printed(environment: dict[str, str], *arguments: str | Path, **more: str) -> str:
    """What it prints; it ends well."""
    done = run(environment, *arguments, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_json(environment: dict[str, str], *arguments: str | Path, **more: str) -> Any:
    """The JSON of its last line, which what ranks warn of may precede; it ends well."""
    return json.loads(printed(environment, *arguments, **more).splitlines()[-1])
