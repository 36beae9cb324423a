"""Profiles: one trace of all ranks, with what each computed, moved and waited for."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn
from fsdpc.monitor import perfetto, profiler
from fsdpc.monitor.flight import Operation

DOCS = Path(__file__).parents[2] / "docs"


def build(**options: Any) -> tuple[Any, Any]:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fsdpc.fully_shard(layer, **options)
    fsdpc.fully_shard(model, **options)
    return model, fsdpc.optim.AdamW(model.parameters())


def step(model: Any, optimizer: Any) -> None:
    model(fsdpc.tensor(np.ones((2, 8), np.float32))).sum().backward()
    fsdpc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def be_late() -> None:
    threading.Event().wait(0.02)


def drawn(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def crossings(events: list[dict[str, Any]]) -> int:
    """Spans of one line that overlap without one being inside the other."""
    found = 0
    lines: dict[tuple[int, int], list[float]] = {}
    for e in sorted(events, key=lambda e: (e.get("ts", 0), -e.get("dur", 0))):
        if e["ph"] != "X":
            continue
        ends = lines.setdefault((e["pid"], e["tid"]), [])
        begin, end = e["ts"] - 1e-3, e["ts"] + e["dur"]
        while ends and ends[-1] <= begin + 2e-3:
            ends.pop()
        found += bool(ends and ends[-1] + 1e-3 < end)
        ends.append(end)
    return found


@pytest.mark.ranks(2)
def test_all_ranks_are_in_one_file(tmp_path: Path) -> None:
    model, optimizer = build()
    for _ in range(2):
        step(model, optimizer)
    path = tmp_path / "made" / "trace.json"
    with fsdpc.profile(path, model) as found:
        for n in range(5):
            with found.mark(f"step {n}"):
                if fsdpc.rank() == 1:
                    be_late()
                step(model, optimizer)
    fsdpc.barrier()
    events = drawn(path)
    seen = Counter((e["pid"], e["name"]) for e in events if e["ph"] == "X")
    for rank in (0, 1):
        assert all(seen[rank, f"step {n}"] == 1 for n in range(5))
        assert seen[rank, "forward Sequential"] == seen[rank, "backward Sequential"] == 5
        for unit in ("0", "1", "2"):
            assert seen[rank, f"forward {unit}"] == seen[rank, f"backward {unit}"] == 5
            assert seen[rank, f"reduce {unit}"] == 5
            assert 5 <= seen[rank, f"gather {unit}"] <= 10  # some backwards find it gathered still
        assert seen[rank, "optimizer"] == 5
    assert crossings(events) == 0
    # Rank 0 waits for the one that is late; waits have a track and a colour that nothing else has.
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    waits = [e for e in events if e.get("cat") == "wait"]
    assert any(e["pid"] == 0 and e["dur"] > 0 for e in waits)
    assert {tracks[e["pid"], e["tid"]] for e in waits} == {"waiting"}
    assert {e["cname"] for e in waits} == {"terrible"}
    assert "terrible" not in {e.get("cname") for e in events if e.get("cat") != "wait"}
    assert all(e["name"].startswith("wait for ") for e in waits)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {name.partition(" (")[0] for name in names} == {"rank 0", "rank 1"}
    text = str(found).splitlines()
    assert [line.partition(":")[0] for line in text] == ["rank 0", "rank 1"]
    assert all(word in text[0] for word in (" ms, forward ", "backward ", "optimizer ", "waiting "))


@pytest.mark.ranks(2)
def test_nothing_is_left_of_a_profile(tmp_path: Path) -> None:
    model, optimizer = build()
    step(model, optimizer)
    held = _core.trace_resize(100, False)
    with fsdpc.profile(tmp_path / "trace.json", model):
        step(model, optimizer)
    after = time.monotonic_ns()
    for _ in range(3):
        if fsdpc.rank() == 1:
            be_late()
        step(model, optimizer)
    assert _core.trace_resize(held, False) == 100
    since = [e[0] for e in _core.trace_events() if e[4] > after]
    assert since and not any(kind.startswith("wait") for kind in since)


@pytest.mark.ranks(2)
def test_a_profile_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    model, optimizer = build()
    file = tmp_path / f"{fsdpc.rank()}"
    file.write_text("no folder")
    with pytest.raises(OSError, match="Not a directory|File exists"):
        with fsdpc.profile(file / "trace.json", model):
            step(model, optimizer)


@pytest.mark.ranks(1)
def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    held = _core.trace_resize(4096, False)
    with pytest.raises(KeyError):
        with fsdpc.profile(tmp_path / "trace.json"):
            raise KeyError
    assert _core.trace_resize(held, False) == 4096 and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="a profile of 0 events: give at least 1"):
        fsdpc.profile(tmp_path / "trace.json", events=0)


@pytest.mark.ranks(1)
def test_too_many_operations_are_told(tmp_path: Path) -> None:
    model, optimizer = build()
    with redirect_stderr(io.StringIO()) as said:
        with fsdpc.profile(tmp_path / "trace.json", events=4) as found:
            step(model, optimizer)
    assert "the last 4 operations of only this rank" in said.getvalue()
    assert found.flight is not None and len(found.flight.operations) == 4
    assert drawn(tmp_path / "trace.json")


def operations(*told: tuple[int, str, str]) -> list[Operation]:
    return [Operation(at, 0, what, unit, 1, 0, False) for at, what, unit in told]


def test_spans_are_paired() -> None:
    found, alone = perfetto.spans(operations(
        (0, "forward", "a"), (1, "forward", "a"), (2, "forward_end", "a"), (3, "forward_end", "a"),
        (4, "reduce", "a"), (5, "all_reduce", "a"), (6, "reduce_done", "a"),  # in two stages
        (7, "optim", "a"), (8, "gather", "a"), (9, "reshard", "a"),
    ))  # fmt: skip
    assert sorted((s.begin, s.end, s.kind) for s in found) == [
        (0, 3, "forward"), (1, 2, "forward"), (4, 6, "reduce"), (5, 6, "all_reduce")
    ]  # fmt: skip
    assert [o.what for o in alone] == ["optim", "reshard", "gather"]
    assert perfetto.busy(found, "forward") == 3
    assert perfetto.busy(found, "reduce", "all_reduce") == 2
    assert perfetto.busy(found, "wait") == 0


def test_spans_that_cross_get_lines_of_their_own() -> None:
    events = perfetto.events(0, "host", operations(
        (0, "backward", "b"), (2, "backward", "a"), (3, "backward_end", "b"),
        (4, "backward_end", "a"), (5, "gather", "a"), (6, "gather", "b"), (7, "gather_done", "b"),
        (8, "gather_done", "a"), (9, "gather", "c"), (9, "gather_done", "c"),
    ))  # fmt: skip
    assert crossings(events) == 0
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    at = {e["name"]: tracks[e["tid"]] for e in events if e["ph"] == "X"}
    assert at == {"backward b": "computing", "backward a": "computing 2", "gather a": "gathers",
                  "gather b": "gathers 2", "gather c": "gathers"}  # fmt: skip


def test_steps_of_fsdpc_train(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--steps", "6", "--batch",
               "1", "--seq", "16", "--sample", "0", "--eval-bytes", "0", "--data", str(DOCS),
               "--profile", "3:4", "--profile-file", str(path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"profiled into {path} (for ui.perfetto.dev)" in done.stdout
    assert done.stdout.count("waiting ") == 2  # a line for each rank
    events = drawn(path)
    assert {e["pid"] for e in events} == {0, 1}
    marks = [e["name"] for e in events if e.get("cat") == "mark" and e["pid"] == 0]
    assert marks == ["step 3", "step 4"]
    seen = Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1)
    assert seen["forward model.layers.0"] == seen["optimizer"] == 2


def test_profiled_steps_end_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = profiler.ProfiledSteps(range(2, 9), tmp_path / "trace.json", None)
    for number in range(1, 4):
        with steps.step(number):
            pass
    steps.end()
    steps.end()
    assert capsys.readouterr().out.count("profiled into") == 1
    assert [e["name"] for e in drawn(tmp_path / "trace.json") if e["ph"] == "X"] == [
        "step 2", "step 3"
    ]  # fmt: skip
    with steps.step(4):  # of a run that went back
        pass
