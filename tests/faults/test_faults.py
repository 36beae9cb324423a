"""Drills by FSDPC_FAULT: each kind strikes once, where it says, behind both frontends."""

from __future__ import annotations

import contextlib
import math
import os
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
from fsdpc.monitor import faults
from fsdpc.sharding.rules import Frontend

ENABLED = {"FSDPC_FAULT_ENABLE": "1"}
SCRIPT = """
import numpy as np
import fsdpc
from fsdpc import nn
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
for layer in model:
    fsdpc.fully_shard(layer)
fsdpc.fully_shard(model)
for step in range(1, 5):
    model(fsdpc.tensor(np.ones((2, 8), np.float32))).sum().backward()
    print("step", step, flush=True)
"""


def build() -> Any:
    fsdpc.manual_seed(2)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        fsdpc.fully_shard(layer)
    return fsdpc.fully_shard(model)


def ones() -> fsdpc.Tensor:
    return fsdpc.tensor(np.ones((2, 8), np.float32))


def start(
    tmp_path: Path, text: str, program: str = SCRIPT, restarts: int = 0, **variables: str
) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(program)
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", "--timeout", "60"]
    command += ["--max-restarts", str(restarts)]
    environment = {**os.environ, "FSDPC_FAULT": text, **variables}
    return subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment)  # fmt: skip


def run(tmp_path: Path, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    with start(tmp_path, *arguments, **options) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_rank_is_killed_in_its_step(tmp_path: Path) -> None:
    done = run(tmp_path, "rank 1: kill at backward of 1 in step 3", **ENABLED)
    assert done.returncode == 128 + signal.SIGKILL
    said = done.stdout + done.stderr
    assert "[1] fsdpc: FSDPC_FAULT on rank 1: kill at backward of 1 in step 3" in said
    assert "[1] step 2" in said and "step 3" not in said.replace("in step 3", "")
    assert "PeerError" in said


def test_ranks_that_start_again_have_no_fault(tmp_path: Path) -> None:
    done = run(tmp_path, "rank 1: kill at backward of 1 in step 3", restarts=1, **ENABLED)
    assert done.returncode == 0
    assert "[1] step 4" in done.stdout and "kill at backward" in done.stdout + done.stderr


def test_it_is_refused_unless_enabled(tmp_path: Path) -> None:
    done = run(tmp_path, "rank 1: kill at backward of 1 in step 3")
    assert done.returncode not in (0, 128 + signal.SIGKILL)
    assert "a drill needs FSDPC_FAULT_ENABLE=1 too" in done.stdout + done.stderr
    assert "step 1" not in done.stdout


CHILDREN = "import subprocess; subprocess.Popen(['sleep', '1000'])"


def marked(launcher: int) -> list[str]:
    """Processes that have a launcher's mark: its ranks, and those that ranks started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"FSDPC_LAUNCHER_PID={launcher}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_nothing_stays_behind_a_dropped_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, "rank 1: drop the launcher at backward of 1 in step 3",
                    f"{CHILDREN}\n{SCRIPT}", restarts=1, **ENABLED)  # fmt: skip
    out, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL and "step 4" not in out
    until = time.monotonic() + 60
    while left := marked(process.pid):
        assert time.monotonic() < until, left
        time.sleep(0.01)


def test_a_launcher_of_others_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPC_FAULT", "rank 1: drop the launcher at backward of 1 in step 3")
    monkeypatch.setenv("FSDPC_FAULT_ENABLE", "1")
    for pid in ("1", ""):
        monkeypatch.setenv("FSDPC_LAUNCHER_PID", pid)
        with pytest.raises(ValueError, match=f"FSDPC_LAUNCHER_PID is '{pid}', and this rank's"):
            faults.watch([], Frontend(bool, list))


def test_a_mistyped_unit_is_named_once(tmp_path: Path) -> None:
    text = "rank 1: kill at backward of 11 in step 3; rank 0: kill at forward of x in step 9"
    script = SCRIPT.replace("(*[", "(nn.Sequential(*[").replace("])", "]))")
    script = script.replace("range(3)", "range(12)").replace("in model:", "in model[0]:")
    done = run(tmp_path, text, script, **ENABLED)
    assert done.returncode == 0
    said = done.stdout.splitlines()
    assert [line for line in said if "FSDPC_FAULT" in line] == [
        "[0] fsdpc: FSDPC_FAULT: 'kill at backward of 11 in step 3': Sequential has no unit '11', "
        "but 0.11",
        "[0] fsdpc: FSDPC_FAULT: 'kill at forward of x in step 9': Sequential has no unit 'x', but "
        "Sequential, 0.0, 0.1",
    ]
    assert "[1] step 4" in said
    layers = [f"layers.{i}" for i in range(32)]
    assert faults._close("layers.33", layers)[0] == "layers.3"
    assert faults._close("layers.33", [f"model.{n}" for n in [*layers, "layers.33"]])[0] == (
        "model.layers.33"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rank 1: kill the launcher at forward of a in step 1", "is not like 'rank 2: kill"),
        ("rank 1: kick at forward of a in step 1", "is not like 'rank 2: kill"),
        ("kill rank 1", "is not like"),
        ("rank 1: kill 3 s at forward of a in step 1", "is not like"),
        ("rank 1: corrupt at forward of a in step 1", "gradients are corrupted at backward"),
    ],
)
def test_what_is_no_fault(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        faults.read_faults({"FSDPC_FAULT": text, **ENABLED})
    assert faults.read_faults({}) == ()


@pytest.mark.ranks(1)
def test_raise_stall_and_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["raise at forward of 1 in step 2", "stall 0.2 s at backward of 2 in step 1"]
    others = "rank 3: raise at forward of 1 in step 1"
    monkeypatch.setenv("FSDPC_FAULT", "; ".join([*(f"rank 0: {t}" for t in texts), others]))
    monkeypatch.setenv("FSDPC_FAULT_ENABLE", "1")
    model = build()
    fsdpc.checkpoint_activations(list(model))  # forward of 1 runs again in backward: no step
    with fsdpc.no_grad():
        model(ones())
    began = time.monotonic()
    model(ones()).sum().backward()
    assert time.monotonic() - began >= 0.2
    with pytest.raises(faults.InjectedFault, match="raise at forward of 1 in step 2, on rank 0"):
        model(ones())
    model(ones()).sum().backward()


@pytest.mark.ranks(2)
def test_a_corrupt_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def norms() -> list[float]:
        model, seen = build(), []
        for _ in range(3):
            model(ones()).sum().backward()
            seen.append(float(fsdpc.clip_grad_norm_(model, math.inf)))
            model.zero_grad()
        return seen

    right = norms()
    monkeypatch.setenv("FSDPC_FAULT", "rank 1: corrupt at backward of 2 in step 2")
    monkeypatch.setenv("FSDPC_FAULT_ENABLE", "1")
    wrong = norms()
    assert wrong[0] == right[0] and wrong[2] == right[2]
    assert wrong[1] == pytest.approx(1e4 / 2, rel=1e-2)
