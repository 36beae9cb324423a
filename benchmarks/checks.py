"""Checks: commands that show something by how they end, each within a limit of time.

A check runs in a session of its own, so that nothing it starts outlives it: once it has ended or
was cut off, its whole process group is killed. What it prints goes to files, not pipes, which a
process that escaped could hold open.

How a check ended is a state and a detail. To end with 0 is not enough to have held: a test that
found nothing to test says so, and so does one that skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HELD, PARTLY, UNTESTED = "held", "held in part", "nothing tested"
FAILED, NOT_RUN, LACKING = "failed", "not run", "not here"
GOOD = (HELD, PARTLY, LACKING)  # LACKING: the machine has not what the check is about
GRACE_S = 5.0  # from SIGTERM, on which Python's tests end their own children, to SIGKILL
LOOK_S = 0.02
LAST_LINES = 20  # of a check that failed
KEPT_CHARACTERS = 200_000  # of each output, in the log

# What a check that ended with 0 has shown, by what it printed.
Judge = Callable[[str], tuple[str, str]]


def ended_well(printed: str) -> tuple[str, str]:
    """Ending with 0 is all."""
    return HELD, ""


def c_test(printed: str) -> tuple[str, str]:
    """A program of tests/c/check.h: it counts what it checked."""
    for line in printed.splitlines():
        if "nothing tested" in line:
            return UNTESTED, line
    checks = sum(map(int, re.findall(r"(\d+) checks, 0 failed", printed)))
    return (HELD, f"{checks:,} checks") if checks else (UNTESTED, "0 checks")


def pytest_run(printed: str) -> tuple[str, str]:
    """pytest: what it skipped was not tested."""
    summaries = [line for line in printed.splitlines() if re.search(r" in [\d.]+s", line)]
    found = re.findall(r"(\d+) (passed|skipped)", "".join(summaries[-1:]))
    counts = {what: int(n) for n, what in found}
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    said = f"{passed} passed, {skipped} skipped"
    return (UNTESTED if not passed else PARTLY if skipped else HELD), said


@dataclass(frozen=True)
class Check:
    """A command, and what its ending means; `speed` prints rows worth keeping."""

    name: str
    command: tuple[str, ...]
    stage: str = ""
    cap_s: float = 60
    judge: Judge = ended_well
    environment: Mapping[str, str] = field(default_factory=dict)
    speed: bool = False
    gpus: int = 1  # without which there is nothing to check


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    check: Check
    state: str
    detail: str = ""
    seconds: float = 0.0
    stdout: str = ""
    stderr: str = ""

    @property
    def verdict(self) -> str:
        """State and detail in one line."""
        return f"{self.state}: {self.detail}" if self.detail else self.state

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.state in GOOD


def last_line(text: str) -> str:
    """The last line that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


class Running:
    """A check under way."""

    def __init__(self, check: Check, limit_s: float) -> None:
        self.check, self.limit_s, self.begun = check, limit_s, time.monotonic()
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process: subprocess.Popen[bytes] | None = None
        self.problem = ""
        try:
            self.process = subprocess.Popen(
                check.command, cwd=ROOT, env={**os.environ, **check.environment},
                stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err,
                start_new_session=True)  # fmt: skip
        except OSError as error:
            self.problem = f"cannot be started: {error}"

    def look(self) -> Outcome | None:
        """How it ended; None while it goes on. Cuts it off when its time is over."""
        if self.process is not None and self.process.poll() is None:
            if time.monotonic() - self.begun < self.limit_s:
                return None
            self.stop()
            self.problem = f"cut off after {self.limit_s:.3g} s"
        seconds = time.monotonic() - self.begun
        self.stop()  # what it left behind
        out, err = (self._read(each) for each in (self.out, self.err))
        if not self.problem and self.process.returncode == 0:
            return Outcome(self.check, *self.check.judge(out), seconds, out, err)
        problem = self.problem or self._ending(last_line(err) or last_line(out))
        return Outcome(self.check, FAILED, problem, seconds, out, err)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Kill all of its process group that is left; a command that goes on may end first."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(grace_s)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _ending(self, reason: str) -> str:
        code = self.process.returncode
        how = f"exit {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        return f"{how}: {reason}" if reason else how

    @staticmethod
    def _read(file: tempfile._TemporaryFileWrapper) -> str:
        file.seek(0)
        with file:
            return file.read().decode(errors="replace")


def run_all(checks: Sequence[Check], rest_s: Callable[[], float],
            at_once: int = 1) -> Iterator[Outcome]:  # fmt: skip
    """Run checks, so many at once; yield each as it ends.

    `rest_s` says how many seconds there are for all that is still to run. What has not begun by
    their end is not run; what has is cut off, and all of it is if the iteration is given up.
    """
    waiting, live = deque(checks), []
    try:
        while waiting or live:
            while waiting and len(live) < at_once:
                check, rest = waiting.popleft(), rest_s()
                if rest <= 0:
                    yield Outcome(check, NOT_RUN, "the time for all checks is over")
                else:
                    live.append(Running(check, min(check.cap_s, rest)))
            time.sleep(LOOK_S)
            for each in list(live):
                if outcome := each.look():
                    live.remove(each)
                    yield outcome
    finally:
        for each in live:
            each.stop()


def run(check: Check) -> Outcome:
    """Run one check."""
    return next(run_all([check], lambda: check.cap_s))


def end_by_exception() -> None:
    """Have SIGTERM end this process by way of its `finally`s, so that its checks end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Record:
    """What is printed, kept as well: a log, and one JSON object a line for each outcome.

    Both are appended to and written as things happen, so that a run that is cut off leaves what it
    had found, and runs of a stage each add up.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.rows = (folder / f"{name}.{kind}" for kind in ("log", "jsonl"))
        self.begun = time.monotonic()

    def say(self, text: str) -> None:
        """Print a text, and keep it."""
        print(text, flush=True)
        self._append(self.log, text)

    def outcome(self, o: Outcome) -> None:
        """Say how a check ended, with its rows or what went wrong, and keep all that it printed."""
        now = time.monotonic() - self.begun
        self.say(f"[{now:5.1f} s] {o.check.stage}: {o.check.name}: {o.verdict} ({o.seconds:.1f} s)")
        if o.check.speed and o.stdout.strip():
            self.say("\n" + o.stdout.strip() + "\n")
        if o.state in (FAILED, UNTESTED):
            printed = o.stderr if o.check.speed else o.stdout + o.stderr
            self.say("\n".join(f"    {line}" for line in printed.splitlines()[-LAST_LINES:]))
        if o.state == PARTLY:
            skipped = [line for line in o.stdout.splitlines() if line.startswith("SKIPPED")]
            self.say("\n".join(f"    {line}" for line in skipped))
        for name, text in (("stdout", o.stdout), ("stderr", o.stderr)):
            self._append(self.log, f"--- {name} of {o.check.name}\n{text[-KEPT_CHARACTERS:]}")
        self.keep({"check": o.check.name, "stage": o.check.stage, "state": o.state,
                   "detail": o.detail, "seconds": round(o.seconds, 2),
                   "command": list(o.check.command), "rows": o.stdout if o.check.speed else ""})

    def keep(self, row: Mapping[str, object]) -> None:
        """Add a line to the JSON."""
        self._append(self.rows, json.dumps(row))

    @staticmethod
    def _append(path: Path, text: str) -> None:
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(text + "\n")
