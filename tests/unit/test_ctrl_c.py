"""Ctrl-C while the ``fsdpc`` command imports its modules, and in programs that import fsdpc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fsdpc

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}
# What a wrapper of pip's holds.
WRAPPER = "import sys\nfrom fsdpc.cli.main import main\nsys.exit(main())\n"
ANSWERED = (
    "import signal, sys, fsdpc\n"
    "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, sys.argv\n"
)


@pytest.mark.parametrize("library", ["_multiarray_umath", "fsdpc/_core."])
@pytest.mark.parametrize("way", ["module", "script"])
def test_it_ends_the_command_without_a_traceback(tmp_path: Path, way: str, library: str) -> None:
    """In the middle of importing NumPy and of importing fsdpc, as mapped libraries show."""
    script = tmp_path / "fsdpc"
    script.write_text(WRAPPER)
    started = ["-m", "fsdpc"] if way == "module" else [str(script)]
    process = subprocess.Popen(
        [sys.executable, *started, "plan", "--gpus", "2x24GB"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    maps, deadline = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 60
    while library not in maps.read_text():
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")


def test_a_program_keeps_its_signals(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ANSWERED)
    (tmp_path / "user").mkdir()
    (tmp_path / "user/__init__.py").write_text(ANSWERED)  # imported while sys.argv[0] is -m
    (tmp_path / "user/__main__.py").write_text(ANSWERED)
    for started in ([str(program)], ["-c", ANSWERED], ["-m", "user"]):
        subprocess.run(
            [sys.executable, *started, "fsdpc"], env=ENVIRONMENT, cwd=tmp_path, check=True
        )


def test_the_command_answers_it_once_it_runs() -> None:
    code = f"import sys; sys.argv = ['fsdpc']; sys.orig_argv = ['python', 'fsdpc']\n{ANSWERED}"
    failed = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True)
    assert b"AssertionError: ['fsdpc']" in failed.stderr
    code = code.replace("fsdpc\nassert", "fsdpc.cli.main\nfsdpc.cli.main.main([])\nassert")
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr
