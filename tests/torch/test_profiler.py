"""Profiles of torch modules; tests/dist has the rest."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpc
from fsdpc.torch import optim

from .common import build, shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ours", [False, True], ids=["torch's optimizer", "ours"])
def test_units_and_optimizers_are_named(ours: bool, tmp_path: Path) -> None:
    model = shard(build(blocks=2))
    kind: Any = optim.AdamW if ours else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    path = tmp_path / "trace.json"
    with fsdpc.profile(path, model) as found:
        for _ in range(3):
            step()
    step()
    fsdpc.barrier()
    events = json.loads(path.read_text())["traceEvents"]
    assert found.flight is not None and not found.flight.missing
    for rank in (0, 1):
        seen = Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank)
        for unit in ("Net", "blocks.0", "blocks.1"):
            assert seen[f"forward {unit}"] == seen[f"backward {unit}"] == 3, seen
            assert seen[f"reduce {unit}"] == 3 and seen[f"gather {unit}"] >= 3
        assert seen["optimizer" if ours else "optimizer AdamW"] == 3
        assert not seen["optimizer AdamW" if ours else "optimizer"]
