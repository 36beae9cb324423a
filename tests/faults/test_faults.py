"""Drills by FSDPC_FAULT: each kind strikes once, where it says, behind both front doors."""

from __future__ import annotations

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
from fsdpc import faults, nn

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


def run(
    tmp_path: Path, text: str, restarts: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", "--timeout", "60"]
    command += ["--max-restarts", str(restarts)]
    environment = {**os.environ, "FSDPC_FAULT": text, **variables}
    return subprocess.run(
        [*command, str(script)], capture_output=True, text=True, env=environment
    )


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
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
