"""The torch frontend on a GPU against torch's FSDP2 and plain torch, at a world of one.

On the CPU the same program shows that it compares what it says; on a GPU it shows the frontend.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fsdpc

TIMEOUT_S = 300

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


def gpu_reason() -> str:
    """Why the frontend cannot run on a GPU here; empty if it can."""
    import torch

    if not torch.cuda.is_available():
        return "this torch has no GPU"
    return "" if fsdpc.cuda.device_count() else fsdpc.cuda.describe()


# Products in bf16 round what AdamW then divides by; on the CPU and in fp32 sums differ in order.
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_trains_as_fsdp2_does(device: str) -> None:
    if device == "cuda" and (reason := gpu_reason()):
        pytest.skip(reason)
    program = Path(__file__).with_name("torch_beside_fsdp2.py")
    # FSDP2's own choice of a mesh is the GPU's where it sees one.
    env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    done = subprocess.run([sys.executable, str(program), device], capture_output=True, text=True,
                          env=env, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["device"] == device
    for dtype, tolerance in (("fp32", 1e-4), ("bf16", 3e-2)):
        for ours in (f"ours {dtype}", f"ours with torch's AdamW {dtype}"):
            for theirs in (f"fsdp2 {dtype}", "plain"):
                for what in ("losses", "norms", "values"):
                    assert results[ours][what] == pytest.approx(
                        results[theirs][what], rel=tolerance, abs=tolerance), (ours, theirs, what)
    assert results["ours fp32"]["losses"][-1] < results["ours fp32"]["losses"][0]
