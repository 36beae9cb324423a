"""Several ranks on one GPU from Python: every strategy has the same bits.

The program is that of tests/emu/test_ranks.py, which runs it on the emulated device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fsdpc

TIMEOUT_S = 240
PROGRAM = Path(__file__).resolve().parents[1] / "emu" / "ranks.py"


def ranks(transport: str, *arguments: str) -> list[Any]:
    """What each rank of ranks.py returned; skips where there is no GPU, or no NCCL for it."""
    if not fsdpc.cuda.device_count():
        pytest.skip(fsdpc.cuda.describe())
    if transport == "nccl" and (found := fsdpc.cuda.describe_nccl()).startswith("none"):
        pytest.skip(found)
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True,
                          text=True, env={**os.environ, "FSDPC_TRANSPORT": transport},
                          timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("transport, world", [("nccl", "1"), ("local_cuda", "1"),
                                              ("local_cuda", "2"), ("local_cuda", "4")])
def test_strategies_have_the_same_bits(transport: str, world: str) -> None:
    results = ranks(transport, "strategies", "cuda", world, "llama,perceptron")
    for rank in results:
        assert rank.pop("transport") == transport
        for variants in rank.values():
            assert all(result == variants["FULL_SHARD"] for result in variants.values()), variants


def test_a_world_of_one_has_the_same_bits_over_both() -> None:
    nccl, local = (ranks(transport, "strategies", "cuda", "1", "perceptron")[0]
                   for transport in ("nccl", "local_cuda"))
    assert {**nccl, "transport": ""} == {**local, "transport": ""}


def test_deterministic_mode_does_not_see_how_ranks_split() -> None:
    one, two, four = (ranks("local_cuda", "deterministic", "cuda", n)[0] for n in "124")
    assert one == two == four
