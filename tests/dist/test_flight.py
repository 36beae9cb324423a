"""Flight recorders: healthy steps, signals, failures; ranks on one clock; a trace for Perfetto."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn
from fsdpc.cli import main
from fsdpc.monitor import flight

SCRIPT = """
import os, signal, sys, time
import numpy as np
import fsdpc
from fsdpc import nn
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
for layer in model:
    fsdpc.fully_shard(layer)
fsdpc.fully_shard(model)
fsdpc.FlightRecorder(sys.argv[1], model).install()
x = fsdpc.tensor(np.ones((2, 8), np.float32))
for step in range(4):
    if step == 3 and fsdpc.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(x).sum().backward()
"""


def build() -> Any:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fsdpc.fully_shard(layer)
    return fsdpc.fully_shard(model)


def backward(model: Any) -> None:
    model(fsdpc.tensor(np.ones((2, 8), np.float32))).sum().backward()


@pytest.mark.ranks(2)
def test_a_healthy_step_of_all_ranks(tmp_path: Path) -> None:
    model = build()
    recorder = fsdpc.FlightRecorder(tmp_path, model)
    for _ in range(2):
        backward(model)
    with recorder.step():
        backward(model)
    fsdpc.barrier()
    found = flight.merge(tmp_path)
    assert [r["rank"] for r in found.ranks] == [0, 1] and not found.missing
    times = [o.at for o in found.operations]
    assert times == sorted(times) and times[0] == 0
    for rank in (0, 1):
        own = [o for o in found.operations if o.rank == rank]
        computed = [o.unit for o in own if o.what == "forward"]
        assert computed == ["Sequential", "0", "1", "2"]  # one step, the units by name
        # A gather ends before the unit computes, and a reduction begins after its backward.
        at = {(o.what, o.unit, o.backward): o.at for o in own}
        assert at["gather_done", "1", False] <= at["forward", "1", False]
        assert at["backward", "1", True] <= at["reduce", "1", True]
    text = found.timeline(3)
    assert "rank 0 (" in text and "step; last " in text and text.count("\n") == 5
    trace = json.loads(json.dumps(found.trace()))["traceEvents"]
    spans = {(e["pid"], e["name"]) for e in trace if e["ph"] == "X"}
    assert {(rank, f"{what} {unit}") for rank in (0, 1) for what in ("forward", "backward")
            for unit in ("0", "1", "2")} <= spans  # fmt: skip
    assert all(e["dur"] >= 0 for e in trace if e["ph"] == "X")
    gathered = {e["name"] for e in trace if e["ph"] == "X" and e["cat"] == "gather"}
    assert gathered == {"gather 0", "gather 1", "gather 2"}


@pytest.mark.ranks(1)
def test_a_signal_writes_and_goes_on(tmp_path: Path) -> None:
    model = build()
    recorder = fsdpc.FlightRecorder(tmp_path / "made", model).install()
    backward(model)
    os.kill(os.getpid(), signal.SIGUSR2)
    found = flight.merge(tmp_path / "made")
    assert found.ranks[0]["reason"] == "SIGUSR2" and found.operations
    assert "test_a_signal_writes_and_goes_on" in "".join(found.ranks[0]["stack"])
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["flight-rank-0.json"]
    recorder.remove()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert sys.excepthook is sys.__excepthook__
    recorder.folder = tmp_path / "file"
    recorder.folder.write_text("")
    recorder._on_signal(signal.SIGUSR2, None)  # says that it cannot, and goes on
    recorder.folder = tmp_path / "made"
    recorder.dump("again")
    assert flight.merge(tmp_path / "made").ranks[0]["reason"] == "again"


@pytest.mark.ranks(2)
def test_a_rank_that_waits_in_the_engine_answers(tmp_path: Path) -> None:
    model = build()
    recorder = fsdpc.FlightRecorder(tmp_path, model).install()
    backward(model)
    waiting = int(fsdpc.all_gather(os.getpid())[0])

    def has_answered() -> bool:
        """From its next step, and not from a call before it."""
        try:
            return "in backward\n" in "".join(flight.merge(tmp_path).ranks[0]["stack"])
        except FileNotFoundError:
            return False

    if fsdpc.rank() == 1:  # rank 0 gathers, and cannot go on without this one
        deadline = time.monotonic() + 30
        while not has_answered():
            assert time.monotonic() < deadline, "rank 0 did not answer"
            os.kill(waiting, signal.SIGUSR2)
            select.select([], [], [], 0.02)
    backward(model)
    recorder.remove()


def test_a_killed_rank_is_seen_in_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "flight"
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", "--timeout", "60"]
    done = subprocess.run([*command, str(script), str(folder)], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGKILL
    found = flight.merge(folder)
    assert found.missing == (1,) and "PeerError" in found.ranks[0]["reason"]
    assert "rank 1" in found.ranks[0]["reason"]
    out = tmp_path / "trace.json"
    assert main.main(["flight", str(folder), "--rows", "4", "--trace", str(out)]) == 0
    said = capsys.readouterr().out
    assert "rank 1: wrote nothing" in said and "PeerError" in said and "4 of " in said
    assert json.loads(out.read_text())["traceEvents"]
    assert main.main(["flight", str(tmp_path / "none")]) == 2


def test_hosts_are_joined_by_the_time_of_day(tmp_path: Path) -> None:
    for rank, (host, now, unix) in enumerate((("a", 100, 5000), ("b", 900, 5010))):
        events = [["forward", 0, 1, 0, now - 50 + rank, False]]
        record = {"rank": rank, "host": host, "pid": 1, "reason": "x", "world": 3, "now_ns": now,
                  "unix_ns": unix, "units": [], "stack": [], "events": events}  # fmt: skip
        (tmp_path / f"flight-rank-{rank}.json").write_text(json.dumps(record))
    found = flight.merge(tmp_path)
    assert [(o.at, o.rank, o.unit) for o in found.operations] == [
        (0, 0, "unit 0"), (11, 1, "unit 0"),
    ]  # fmt: skip
    assert found.missing == (2,)
