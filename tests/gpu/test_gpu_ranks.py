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
from tests.needs import need_nccl

import fsdpc

TIMEOUT_S = 240
PROGRAM = Path(__file__).resolve().parents[1] / "emu" / "ranks.py"


def ranks(transport: str, *arguments: str, program: Path = PROGRAM) -> list[Any]:
    """What each rank of a program returned; skips where there is no GPU, or no NCCL for it."""
    if not fsdpc.cuda.device_count():
        pytest.skip(fsdpc.cuda.describe())
    if transport == "nccl":
        need_nccl(int(arguments[2]))
    done = subprocess.run([sys.executable, str(program), *arguments], capture_output=True,
                          text=True, env={**os.environ, "FSDPC_TRANSPORT": transport},
                          timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("transport, world", [("nccl", "1"), ("nccl", "2"), ("local_cuda", "1"),
                                              ("local_cuda", "2"), ("local_cuda", "4")])
def test_strategies_have_the_same_bits(transport: str, world: str) -> None:
    """Over NCCL of two at most: sums of more are in an order of its own."""
    results = ranks(transport, "strategies", "cuda", world, "llama,perceptron")
    for rank in results:
        assert rank.pop("transport") == transport
        for variants in rank.values():
            assert all(result == variants["FULL_SHARD"] for result in variants.values()), variants


def test_a_world_of_one_has_the_same_bits_over_both() -> None:
    nccl, local = (ranks(transport, "strategies", "cuda", "1", "perceptron")[0]
                   for transport in ("nccl", "local_cuda"))
    assert {**nccl, "transport": ""} == {**local, "transport": ""}


@pytest.mark.parametrize("transport, worlds", [("local_cuda", "124"), ("nccl", "124")])
def test_deterministic_mode_does_not_see_how_ranks_split(transport: str, worlds: str) -> None:
    found = [rank for n in worlds for rank in ranks(transport, "deterministic", "cuda", n,
                                                    "fp32,bf16")]
    for dtype in ("fp32", "bf16"):
        results = [result for rank in found for variant, (result, _) in rank.items()
                   if variant.endswith(dtype)]
        assert results and all(result == results[0] for result in results)
    assert all(held == planned for rank in found for _, (held, planned) in rank.values())


@pytest.mark.parametrize("world", ["1", "2"])
def test_replays_over_nccl_are_the_steps_they_stand_for(world: str) -> None:
    program = PROGRAM.with_name("graph_ranks.py")
    for rank in ranks("nccl", "replays", "cuda", world, program=program):
        for plain, graph in rank.values():
            assert graph == plain and len(set(plain["losses"])) == 7
