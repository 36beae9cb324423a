"""Ray Train: the example's training function on two ranks; under Ray where that is installed."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401 - optimizers import it at their first use: here once

import fsdpc

SCRIPT = Path(__file__).parents[2] / "examples" / "ray_train.py"


def train(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The reports of this rank."""
    torch.set_num_threads(1)
    reports: list[dict[str, Any]] = []
    config = {"folder": str(folder), "steps": steps}
    runpy.run_path(str(SCRIPT))["train"](config, reports.append)
    return reports


@pytest.mark.ranks(2, timeout=300)
def test_the_training_function_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 10)
    assert [(each["step"], each["begin"], each["ranks"]) for each in whole] == [
        (5, 0, 2), (10, 0, 2)
    ]  # fmt: skip
    assert whole[1]["loss"] < whole[0]["loss"]
    first, then = train(tmp_path / "parts", 7), train(tmp_path / "parts", 10)
    assert first == whole[:1]
    assert then == [{**whole[1], "begin": 5}]
    if fsdpc.rank() == 0:
        names = sorted(path.name for path in (tmp_path / "parts").iterdir() if path.is_dir())
        assert names == ["step-00000005", "step-00000010"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[train]")
def test_under_ray_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    fault = "rank 1: kill at backward of 0 in step 7"
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # for names of sockets
        environment = {**os.environ, "FSDPC_FAULT_ENABLE": "1", "FSDPC_FAULT": fault,
                       "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short}  # fmt: skip
        done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), "10"], env=environment,
                              capture_output=True, text=True, timeout=300)  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "FSDPC_FAULT on rank 1: kill" in said and "'begin': 5, 'ranks': 2" in said
    assert (tmp_path / "checkpoints" / "step-00000010").is_dir()
