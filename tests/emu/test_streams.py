"""The engine on several streams: races are found, and what each kind of wait is for is missed.

tests/gpu/test_streams.c says what runs.  ThreadSanitizer sees the order that the emulated device
gives to its streams, which is the order that CUDA promises, so it reports two accesses that no
event orders whether or not they met.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 900
TIMEOUT_S = 300
WAITS = ("published", "released", "filled", "gathered", "reduced", "staged")

sys.path.insert(0, str(ROOT / "tools"))
import ctest  # noqa: E402

pytestmark = pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed")


def build(sanitizer: str) -> Path:
    """Build the test with a sanitizer."""
    done = subprocess.run([sys.executable, "tools/cuda_build.py", "--emulate", "--streams",
                           "--sanitizer", sanitizer],
                          cwd=ROOT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def under_tsan() -> Path:
    """The test under ThreadSanitizer."""
    return build("thread")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the test, with fixed addresses as clang's sanitizers want them."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=4",
                   "ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    return subprocess.run([*ctest.fixed_addresses(), str(program), *arguments], env=environment,
                          capture_output=True, text=True, timeout=TIMEOUT_S)


def test_nothing_races(under_tsan: Path) -> None:
    done = run(under_tsan)
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr


def test_nothing_is_touched_outside_of_its_life(emulated: dict[str, Path]) -> None:
    done = run(build("address"))
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_left_out_races(under_tsan: Path, wait: str) -> None:
    # A race is not reported if its first half is forgotten by then, so there are several runs.
    done = run(under_tsan, "without", wait, "races")
    assert done.returncode == 66 and "data race" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_left_out_makes_wrong_numbers(emulated: dict[str, Path], wait: str) -> None:
    done = run(emulated["test_streams"], "without", wait)
    assert done.returncode == 0, done.stdout + done.stderr
