"""Drills by FSDPC_FAULT behind the torch frontend; tests/faults has the rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fsdpc
from fsdpc import StabilizerOptions, TrainingStabilizer
from fsdpc.monitor import faults

from .common import batch, build, loss_of, shard


@pytest.mark.ranks(1)
def test_a_mistyped_unit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(faults, "say", said.append)
    monkeypatch.setenv("FSDPC_FAULT_ENABLE", "1")
    monkeypatch.setenv("FSDPC_FAULT", "rank 0: raise at backward of block.1 in step 1")
    model: Any = shard(build())
    for step in range(2):
        loss_of(model, batch(step, 0)).backward()
    (line,) = said  # once, at the first forward
    assert "has no unit 'block.1', but blocks.1" in line


@pytest.mark.ranks(2)
def test_faults_strike_as_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPC_FAULT_ENABLE", "1")
    monkeypatch.setenv(
        "FSDPC_FAULT",
        "rank 1: corrupt at backward of blocks.1 in step 2; "
        "rank 0: raise at backward of blocks.0 in step 4; "
        "rank 1: raise at backward of blocks.0 in step 4",
    )
    model: Any = shard(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = StabilizerOptions(norm_limit=100.0, least=1)
    stabilizer = TrainingStabilizer(model, optimizer, math.inf, options, lambda line: None)
    seen = []
    for step in range(3):
        stabilizer.watch(loss_of(model, batch(step, fsdpc.rank()))).backward()
        seen.append(stabilizer.step())
        optimizer.zero_grad()
    assert [done.reason for done in seen] == ["", "norm", ""]
    assert seen[1].norm == pytest.approx(1e4 / 2, rel=0.05)
    with pytest.raises(faults.InjectedFault, match="backward of blocks.0 in step 4, on rank"):
        loss_of(model, batch(4, fsdpc.rank())).backward()
