"""A checkpoint that two ranks wrote under an earlier layout of rows loads bit for bit.

``save`` made ``data/rows_of_64.tar.gz`` when a row of a 1-D parameter was 64 elements. What it
holds follows from the model, so a run without sharding has the same bits. The archive also has the
same state as a file for each rank, a layout that is not read.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint, nn, optim
from fsdpc.checkpoint import generators
from fsdpc.optim import get_optimizer_state_dict

DATA = Path(__file__).parent / "data" / "rows_of_64.tar.gz"
SHAPES = {"matrix": (5, 3), "bias": (100,), "brain": (70,), "kernels": (2, 3, 3), "one": (1,)}


def drawn(name: str, seed: int) -> Any:
    """Values of a parameter, or its gradient: multiples of 1/64, exact in bf16."""
    rng = np.random.default_rng([*SHAPES[name], seed])
    t = fsdpc.tensor(rng.integers(-100, 100, SHAPES[name]).astype(np.float32) / 64)
    return t.to(fsdpc.bfloat16) if name == "brain" else t


class Model(nn.Module):
    """Rows of every kind; a gradient is ``drawn(name, 1)``, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            setattr(self, name, nn.Parameter(drawn(name, 0)))

    def forward(self) -> Any:
        return sum(((p * drawn(name, 1)).float().sum() for name, p in self.named_parameters()))


def trained(sharded: bool) -> dict[str, Any]:
    """Model and optimizer after one step."""
    model = Model()
    if sharded:
        fsdpc.fully_shard(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.5)
    model().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save(folder: Path) -> None:
    """Write what is in the archive; collective."""
    with mock.patch.dict(generators._kinds, clear=True):  # 13 kB of random numbers' states
        checkpoint.save(folder / "full", trained(True))


def everything(state: dict[str, Any]) -> dict[str, bytes]:
    """Full values and states by name; collective."""
    found = {name: t.numpy().tobytes() for name, t in state["model"].state_dict().items()}
    states = get_optimizer_state_dict(state["model"], state["optimizer"])["state"]
    for name, entry in states.items():
        for key, value in entry.items():
            found[f"{name}.{key}"] = bytes(value.numpy()) if key != "step" else b"%d" % int(value)
    return found


@pytest.mark.ranks([1, 2, 3])
def test_rows_of_64_load_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / str(fsdpc.rank())
    with tarfile.open(DATA) as archive:
        archive.extractall(folder, filter="data")
    state = trained(True)
    with fsdpc.no_grad():
        for p in state["model"].parameters():
            p.local.fill_(7)
    checkpoint.load(folder / "full", state)
    found = everything(state)
    expected = everything(trained(False))
    assert found.keys() == expected.keys() and len(found) == 4 * len(SHAPES)
    for name, value in expected.items():
        assert found[name] == value, name
    with pytest.raises(checkpoint.CheckpointError, match="version 1 with layout 'per_rank'; this"):
        checkpoint.load(folder / "per_rank", state)
