"""Signals to a launcher: who gets them, and who has the time to save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdpc.distributed.environment import rank_environments
from fsdpc.launching import forked
from fsdpc.launching.process import STOPS
from fsdpc.launching.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("no_engine_threads")


def stop(path: Path, text: str, signum: int) -> tuple[int, str, str]:
    """Run a script on one rank, and send the launcher a signal once it has printed a line."""
    path.write_text("import os, sys, time, signal\n" + text)
    with subprocess.Popen(
        [sys.executable, "-m", "fsdpc", "run", "--ranks", "1", "--max-restarts", "3", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(forked.__file__).parents[2])},
    ) as process:  # fmt: skip
        assert process.stdout.readline().endswith("ready\n")
        process.send_signal(signum)
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_ranks_that_save_keep_their_workers(tmp_path: Path) -> None:
    text = """
import subprocess
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
worker = subprocess.Popen(["cat"], **pipes)
def stop(signum, frame):
    print("worker says", worker.communicate("data\\n")[0])
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready")
while True:
    signal.pause()
"""
    code, out, _ = stop(tmp_path / "script.py", text, signal.SIGTERM)
    assert code == 0 and "worker says data" in out


def test_sigusr1_ends_ranks_without_a_handler(tmp_path: Path) -> None:
    text = "print('ready')\ntime.sleep(100)"
    code, _, err = stop(tmp_path / "script.py", text, signal.SIGUSR1)
    assert code == 128 + signal.SIGUSR1 and "start again" not in err


@pytest.mark.parametrize("ends", [True, False], ids=["all end", "one stays"])
def test_ranks_that_save_at_sigterm_have_the_time(ends: bool) -> None:
    """The patience with those that stay begins when the first has ended."""
    ours, theirs = os.pipe()
    grace = 1.0 if ends else 0.2  # both end within it of each other, on a busy machine too

    def save(signum: int, frame: object) -> None:
        time.sleep(3 * grace)  # as long as it takes
        while not ends and os.environ["RANK"] == "1":
            signal.pause()
        os._exit(0)

    def body(result: int) -> None:
        signal.signal(signal.SIGTERM, save)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        os.write(theirs, b"r")
        while True:
            signal.pause()

    supervisor = Supervisor(lambda text: None, grace=grace)
    try:
        for variables in rank_environments(2):
            supervisor.start(variables, body)
        ready = b""
        while len(ready) < 2:
            ready += os.read(ours, 2)
        supervisor.stop(signal.SIGTERM)
        supervisor.watch()
        codes = [rank.code for rank in supervisor.ranks]
    finally:
        supervisor.close()
        os.close(ours)
        os.close(theirs)
    assert codes == [0, 0 if ends else -signal.SIGKILL]
    assert supervisor.killed == (set() if ends else {1})
