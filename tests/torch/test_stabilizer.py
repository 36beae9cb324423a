"""Steps that are skipped behind the torch frontend; tests/dist has the rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fsdpc
from fsdpc import StabilizerOptions, TrainingStabilizer, _core
from fsdpc.torch import clip_grad_norm_, fully_shard
from tests.events import event_counts

from . import common  # noqa: F401, imports once what every rank's first step would

OPTIONS = StabilizerOptions(window=8, least=3, patience=2)


@pytest.mark.ranks(2)
def test_steps_are_skipped_as_natively() -> None:
    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        fully_shard(model[0])
        fully_shard(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, n: int, factor: float = 1.0) -> Any:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(7 * n + fsdpc.rank()))
        return (model(x).square().mean() + 1) * factor

    (model, optimizer), (twin, other) = made(), made()
    stabilizer = TrainingStabilizer(model, optimizer, options=OPTIONS, log=lambda line: None)
    for n in range(5):
        _core.trace_reset()
        loss(twin, n).backward()
        norm = float(clip_grad_norm_(twin, 1.0))
        other.step()
        other.zero_grad()
        plain = event_counts()
        _core.trace_reset()
        stabilizer.watch(loss(model, n)).backward()
        assert stabilizer.step().norm == norm
        optimizer.zero_grad()
        assert n == 0 or event_counts() == plain
    pieces = [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, pieces, twin.parameters()))
    stabilizer.watch(loss(model, 5, 1e4 if fsdpc.rank() else 1.0)).backward()
    assert stabilizer.step().reason == "loss"
    stabilizer.watch(loss(model, 6)).backward()
    if fsdpc.rank() == 1:
        model[2].weight.grad.fill_(math.inf)  # its two rows of the four
    found = stabilizer.step()
    assert (found.reason, found.names) == ("nonfinite", ("2.weight",)) and found.go_back
    assert all(map(torch.equal, pieces, model.parameters()))
