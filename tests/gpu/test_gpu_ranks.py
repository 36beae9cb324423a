"""Several ranks on one GPU from Python: every strategy has the same bits.

The program is that of tests/emu/test_ranks.py, which runs it on the emulated device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.needs import need_nccl

import fsdpc

TIMEOUT_S = 240
PROGRAM = Path(__file__).resolve().parents[1] / "emu" / "ranks.py"


def ranks(*arguments: str, program: Path = PROGRAM) -> list[Any]:
    """What each rank of a program returned; skips where there is no GPU, or no NCCL for it."""
    if not fsdpc.cuda.device_count():
        pytest.skip(fsdpc.cuda.describe())
    if int(arguments[2]) > 1:
        need_nccl(int(arguments[2]))
    done = subprocess.run([sys.executable, str(program), *arguments], capture_output=True,
                          text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("world, transport", [("1", "self"), ("2", "nccl")])
def test_strategies_have_the_same_bits(world: str, transport: str) -> None:
    """Of two ranks at most: NCCL sums those of more in an order of its own."""
    results = ranks("strategies", "cuda", world, "llama,perceptron")
    for rank in results:
        assert rank.pop("transport") == transport
        for variants in rank.values():
            assert all(result == variants["FULL_SHARD"] for result in variants.values()), variants


def test_deterministic_mode_does_not_see_how_ranks_split() -> None:
    found = [rank for n in "124" for rank in ranks("deterministic", "cuda", n, "fp32,bf16")]
    for dtype in ("fp32", "bf16"):
        results = [result for rank in found for variant, (result, _) in rank.items()
                   if variant.endswith(dtype)]
        assert results and all(result == results[0] for result in results)
    assert all(held == planned for rank in found for _, (held, planned) in rank.values())


def test_replays_are_the_steps_they_stand_for() -> None:
    for rank in ranks("replays", "cuda", "2", program=PROGRAM.with_name("graph_ranks.py")):
        for plain, graph in rank.values():
            assert graph == plain and len(set(plain["losses"])) == 7
