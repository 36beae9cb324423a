"""Steps that are skipped: by any rank's loss, by the norm, by what is not finite; and the way back.

Healthy steps are those of a loop without a stabilizer, to the bit and to the collective.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import StabilizerOptions, TrainingStabilizer, _core, nn
from fsdpc.checkpoint import CheckpointManager
from fsdpc.data import DistributedSampler, Loader, SequenceDataset
from tests.events import event_counts

OPTIONS = StabilizerOptions(window=8, least=3, patience=2)


class Net(nn.Module):
    """Two layers; the loss, about 1, is multiplied by what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Any, factor: float) -> fsdpc.Tensor:
        return ((self.b(self.a(x)) ** 2).mean() + 1) * factor


def build(strategy: str = "FULL_SHARD", mesh: Any = None) -> tuple[Net, Any]:
    _core.manual_seed(3)
    model = Net()
    for part in (model.a, model):
        fsdpc.fully_shard(part, strategy=strategy, mesh=mesh)
    return model, fsdpc.optim.AdamW(model.parameters(), lr=1e-3)


def x_of(step: int) -> fsdpc.Tensor:
    rng = np.random.default_rng([step, fsdpc.rank()])
    return fsdpc.tensor(rng.normal(size=(3, 4)).astype(np.float32))


def weights(model: Net) -> list[np.ndarray]:
    return [fsdpc.full_tensor(p).numpy().copy() for p in model.parameters()]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all((x == y).all() for x, y in zip(a, b, strict=True))


def step(s: TrainingStabilizer, number: int, factor: float = 1.0, micro: int = 1) -> Any:
    for _ in range(micro):
        s.watch(s.model(x_of(number), factor)).backward()
    done = s.step()
    s.optimizer.zero_grad()
    return done


@pytest.mark.ranks(2)
def test_a_healthy_step_costs_the_norm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []  # of fsdpc.distributed, which the trace does not count
    for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
        monkeypatch.setattr(fsdpc.distributed, name, lambda *args, name=name: calls.append(name))
    model, optimizer = build()
    twin, other = build()
    stabilizer = TrainingStabilizer(model, optimizer, options=OPTIONS)
    counts = []
    for n in range(12):
        _core.trace_reset()
        twin(x_of(n), 1.0).backward()
        norm = float(fsdpc.clip_grad_norm_(twin, 1.0))
        other.step()
        other.zero_grad()
        plain = event_counts()
        _core.trace_reset()
        done = step(stabilizer, n)
        counts.append((plain, event_counts()))
        assert done.taken and done.norm == norm
    assert not calls and same(weights(model), weights(twin))
    assert counts[-1][0] == counts[-1][1]
    assert counts[-1][1]["collective"] == 1
    assert math.isfinite(stabilizer.limit)  # it did compare


@pytest.mark.ranks(4)
def test_the_loss_of_one_rank_skips_the_step_on_all() -> None:
    meshes = {"FULL_SHARD": None, "NO_SHARD": None, "HYBRID_SHARD": (2, 2)}
    for strategy, shape in meshes.items():
        mesh = fsdpc.init_device_mesh("cpu", shape) if shape else None
        lines: list[str] = []
        stabilizer = TrainingStabilizer(*build(strategy, mesh), options=OPTIONS, log=lines.append)
        for n in range(3):
            assert step(stabilizer, n, micro=2).taken
        before, limit = weights(stabilizer.model), stabilizer.limit
        done = step(stabilizer, 3, 1e3 if fsdpc.rank() == 3 else 1.0, micro=2)
        assert (done.taken, done.reason, done.go_back) == (False, "loss", False)
        assert "on rank 3 (above" in done.text and "rank 0" not in done.text
        assert len(lines) == (fsdpc.rank() == 0) and all(done.text in line for line in lines)
        assert same(before, weights(stabilizer.model)) and stabilizer.limit == limit
        assert step(stabilizer, 4, 1e3 if fsdpc.rank() == 1 else 1.0).go_back
        assert step(stabilizer, 5).taken and stabilizer.in_a_row == 0
        assert stabilizer.skipped == {"loss": 2, "norm": 0, "nonfinite": 0}
        assert not same(before, weights(stabilizer.model))


@pytest.mark.ranks(2)
def test_norms_and_what_is_not_finite() -> None:
    stabilizer = TrainingStabilizer(*build(), options=OPTIONS, log=lambda line: None)
    assert step(stabilizer, 0, 1e3).norm > 10 and stabilizer.in_a_row == 0  # one of the first
    stabilizer = TrainingStabilizer(*build(), options=OPTIONS, log=lambda line: None)
    for n in range(3):
        assert step(stabilizer, n).taken
    model = stabilizer.model
    stabilizer.watch(model(x_of(3), 1.0)).backward()
    if fsdpc.rank() == 1:
        model.b.weight.grad.numpy()[...] = 1e3
    done = stabilizer.step()
    assert done.reason == "norm" and done.norm > 10 and "above 10" in done.text
    stabilizer.watch(model(x_of(1), 1.0)).backward()
    if fsdpc.rank() == 1:
        model.b.weight.grad.numpy()[...] = math.nan  # its one row of the two
    done = stabilizer.step()
    assert (done.reason, done.names) == ("nonfinite", ("b.weight",)) and done.go_back
    done = step(stabilizer, 2, math.nan if fsdpc.rank() == 0 else 1.0)
    assert done.reason == "nonfinite" and "loss nan on rank 0" in done.text
    assert step(stabilizer, 3).taken
    with pytest.raises(RuntimeError, match="without a loss"):
        stabilizer.step()


@pytest.mark.ranks(2)
def test_going_back_brings_another_order(tmp_path: Path) -> None:
    model, optimizer = build()
    folder = fsdpc.all_gather(np.frombuffer(str(tmp_path).encode().ljust(500), np.uint8))[0]
    manager = CheckpointManager(bytes(folder).decode().strip())
    data = SequenceDataset([np.arange(200, dtype=np.uint8)], 2)
    place = fsdpc.rank(), fsdpc.world_size()
    with Loader(data, 2, DistributedSampler(len(data), *place)) as loader:
        state = {"model": model, "optimizer": optimizer, "data": loader}
        stabilizer = TrainingStabilizer(model, optimizer, options=OPTIONS, log=lambda line: None)
        with pytest.raises(FloatingPointError, match="no checkpoint to go back to"):
            stabilizer.go_back(manager, state)
        for n in range(3):
            next(loader)
            step(stabilizer, n)
        manager.save(3, state)
        saved = weights(model)
        following = [next(loader)[0].tolist() for _ in range(4)]
        assert step(stabilizer, 3).taken and not same(saved, weights(model))
        assert [step(stabilizer, n, math.nan).go_back for n in (4, 5)] == [False, True]
        assert stabilizer.go_back(manager, state) == 3 and stabilizer.in_a_row == 0
        assert same(saved, weights(model))
        cursor = loader.state_dict()
        again = [next(loader)[0].tolist() for _ in range(4)]
        assert again != following and stabilizer.went_back == 1
        loader.load_state_dict(cursor)  # a resumed run has the order too
        assert [next(loader)[0].tolist() for _ in range(4)] == again
        assert step(stabilizer, 6).taken
    other = TrainingStabilizer(model, optimizer)
    other.load_state_dict(stabilizer.state_dict())
    assert (other.went_back, other.skipped["nonfinite"]) == (1, 2)


def test_fsdpc_train_goes_back(tmp_path: Path) -> None:
    """Three gradients in a row are wrong on one rank; it goes on from the checkpoint before."""
    data = tmp_path / "data.txt"
    data.write_text("It was a dark and stormy night; the rain fell in torrents. " * 200)
    faults = [f"rank 1: corrupt at backward of model.layers.0 in step {n}" for n in (13, 14, 15)]
    command = [
        sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--steps", "16", "--batch", "2",
        "--seq", "32", "--dtype", "fp32", "--data", str(data), "--eval-bytes", "0", "--sample",
        "0", "--stabilize", "--checkpoint", str(tmp_path / "run"), "--save-every", "4",
        "--metrics", str(tmp_path / "m.jsonl"),
    ]  # fmt: skip
    environment = {**os.environ, "FSDPC_FAULT_ENABLE": "1",
                   "FSDPC_FAULT": "; ".join(faults)}  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("step skipped") == 3, said
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == [*range(1, 16), *range(13, 17)]  # back to the checkpoint of step 12


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="least 10 is more than the window of 5"):
        StabilizerOptions(window=5)
    with pytest.raises(ValueError, match="patience must be at least 1"):
        StabilizerOptions(patience=0)
