"""The engine on several streams: races are found, and what each kind of wait is for is missed.

tests/gpu/test_streams.c says what runs. ThreadSanitizer sees the order that the emulated device
gives to its streams, which is the order that CUDA promises, so it reports two accesses that no
event orders whether or not they met, by whatever addresses of one memory (tests/emu/emu_alias.c).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import built

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
PROGRAMS = [["test_streams"], ["test_engine_windows", "2"]]  # with the largest world, for speed
WAITS = ("published", "released", "taken", "filled", "gathered", "reduced", "partial", "computed",
         "arrived")

sys.path.insert(0, str(ROOT / "tools"))
import ctest  # noqa: E402


@pytest.fixture(scope="module")
def under_tsan() -> dict[str, Path]:
    """The tests under ThreadSanitizer."""
    return built("--streams", "--sanitizer", "thread")


@pytest.fixture(scope="module")
def under_asan() -> dict[str, Path]:
    """The tests under AddressSanitizer."""
    return built("--streams", "--sanitizer", "address")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the test, with fixed addresses as clang's sanitizers want them."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=4",
                   "ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    return subprocess.run([*ctest.fixed_addresses(), str(program), *arguments], env=environment,
                          capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda words: words[0])
def test_nothing_races(under_tsan: dict[str, Path], program: list[str]) -> None:
    done = run(under_tsan[program[0]], *program[1:])
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.soak  # building it takes minutes
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda words: words[0])
def test_nothing_is_touched_outside_of_its_life(under_asan: dict[str, Path],
                                                program: list[str]) -> None:
    done = run(under_asan[program[0]], *program[1:])
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_left_out_races(under_tsan: dict[str, Path], wait: str) -> None:
    # A race is not reported if its first half is forgotten by then, so there are several runs.
    done = run(under_tsan["test_streams"], "without", wait, "races")
    assert done.returncode == 66 and "data race" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_left_out_makes_wrong_numbers(emulated: dict[str, Path], wait: str) -> None:
    done = run(emulated["test_streams"], "without", wait)
    assert done.returncode == 0, done.stdout + done.stderr
