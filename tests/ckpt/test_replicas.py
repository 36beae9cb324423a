"""Replicas that drifted apart are named at the next save; those of equal training never are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint, nn, optim


def native(how: str) -> Any:
    fsdpc.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 70), nn.Linear(70, 4))
    mesh = None
    if how == "HYBRID_SHARD":
        mesh = fsdpc.init_device_mesh("cpu", (2, fsdpc.world_size() // 2))
    options: dict[str, Any] = {"strategy": how} if mesh is None else {"strategy": how, "mesh": mesh}
    return fsdpc.fully_shard(model, **options)


def train(model: Any, rate: float, steps: int = 3) -> None:
    optimizer = optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        seed = 10 * step + fsdpc.rank()
        x = np.random.default_rng(seed).standard_normal((3, 6), np.float32)
        model(fsdpc.tensor(x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = ["NO_SHARD", "HYBRID_SHARD"]


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("how", CASES)
def test_other_learning_rates_are_named(how: str, tmp_path: Path) -> None:
    model = native(how)
    train(model, 0.01)
    checkpoint.save(tmp_path / "same", {"model": model})
    world = fsdpc.world_size()
    train(model, 0.01 if fsdpc.rank() < world // 2 else 0.02, steps=1)
    words = rf"'0.weight' of unit 'Sequential' has other values on .*rank {world - 1} and"
    with pytest.raises(fsdpc.MismatchError, match=words):
        checkpoint.save(tmp_path / "apart", {"model": model}, async_=how == "NO_SHARD")
    fsdpc.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["same"]
    checkpoint.load(tmp_path / "same", {"model": model})
    checkpoint.save(tmp_path / "again", {"model": model})


@pytest.mark.ranks(2)
def test_a_write_on_one_rank_of_a_torch_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fsdpc.torch import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 70), torch.nn.BatchNorm1d(70))
    fully_shard(model, mesh=fsdpc.init_device_mesh("cpu", (2, 1)))
    model[1].running_mean += fsdpc.rank()  # rank 0's are saved, as the documentation says
    checkpoint.save(tmp_path / "same", {"model": model})
    with torch.no_grad():
        if fsdpc.rank() == 1:
            model[1].weight += 1
    with pytest.raises(fsdpc.MismatchError, match=r"'1.weight' .* rank 1 and its replica, rank 0"):
        checkpoint.save(tmp_path / "apart", {"model": model})
