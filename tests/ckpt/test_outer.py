"""Checkpoints of replicas that train apart: the anchors, and what each replica has of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fsdpc
from fsdpc import checkpoint, nn
from fsdpc.checkpoint import CheckpointError
from fsdpc.optim import get_optimizer_state_dict
from fsdpc.optim.state import full_states
from fsdpc.torch import Outer, fully_shard
from fsdpc.torch import optim as torch_optim
from tests.dist.common import LR, assert_same, build, parameters
from tests.dist.test_outer import NESTEROV, inner_step


class Run:
    """A native run with an inner optimizer, averages and outer steps."""

    def __init__(self, mesh: tuple[int, int], optimizer: str = "AdamW", **options: Any) -> None:
        self.model = build(True, mesh=fsdpc.init_device_mesh("cpu", mesh))
        self.optimizer = getattr(fsdpc.optim, optimizer)(self.model.parameters(), lr=LR)
        self.ema = fsdpc.EMA(self.model, 0.5)
        self.outer = fsdpc.Outer(self.model, **{"every": 4, **NESTEROV, **options})

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "ema": self.ema,
                "outer": self.outer}  # fmt: skip

    def train(self, *steps: int) -> Run:
        for step in steps:
            inner_step(self.model, self.optimizer, step)
            self.ema.update()
            self.outer.step()
        return self

    def values(self) -> dict[str, np.ndarray]:
        """This replica's parameters and averages, and the momentum."""
        averages = self.ema.state_dict()["averages"]
        found = {**parameters(self.model)}
        found |= {f"{name}.average": value.numpy().copy() for name, value in averages.items()}
        for name, p in self.model.named_parameters():
            for state, value in self.outer.optimizer.state(p).items():
                if state != "step":
                    found[f"{name}.{state}"] = value.numpy().copy()
        return found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"momentum": 0.0, "nesterov": False}])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_a_resumed_round_has_the_same_bits(
    mesh: tuple[int, int], options: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    for saved in (2, 4):  # inside a round, and at its end
        run = Run(mesh, optimizer, **options).train(*range(saved))
        checkpoint.save(tmp_path / str(saved), run.state)
        expected = run.train(*range(saved, 9)).values()
        other = Run(mesh, optimizer, **options).train(7)
        checkpoint.load(tmp_path / str(saved), other.state)
        assert other.outer.calls == saved
        assert_same(other.train(*range(saved, 9)).values(), expected)


def saved_values(folder: str, mesh: tuple[int, int], load: bool) -> list[Any]:
    """What a replica's first rank has after a save, or after a load of it."""
    run = Run(mesh)
    if load:
        checkpoint.load(folder, run.state)
    else:
        checkpoint.save(folder, run.train(0, 1).state)
    own = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    states = {f"{n}.{k}": np.array(v) for n, state in own.items() for k, v in state.items()}
    anchors = {
        f"{n}.anchor": dict(full_states(run.outer.optimizer, p))["anchor"].numpy().copy()
        for n, p in run.model.named_parameters()
    }
    return [fsdpc.rank() // mesh[1], {**parameters(run.model), **states, **anchors}]


def test_shards_may_become_fewer(tmp_path: Path) -> None:
    """Each replica has its own values again, on another number of ranks."""
    folder = str(tmp_path / "saved")
    before = dict(fsdpc.launch(saved_values, 4, folder, (2, 2), False))
    after = dict(fsdpc.launch(saved_values, 2, folder, (2, 1), True))
    assert before.keys() == after.keys() == {0, 1}
    name = next(iter(before[0]))
    assert (before[0][name] != before[1][name]).any()
    for replica, values in before.items():
        assert values.keys() == after[replica].keys()
        for name, value in values.items():
            np.testing.assert_array_equal(value, after[replica][name], name)


@pytest.mark.ranks(4)
def test_replicas_may_not_become_fewer(tmp_path: Path) -> None:
    run = Run((2, 2)).train(0, 1)
    checkpoint.save(tmp_path / "saved", run.state)
    other = Run((4, 1))
    with pytest.raises(CheckpointError, match="2 replicas trained apart, and this run has 4: load"):
        checkpoint.load(tmp_path / "saved", other.state)


@pytest.mark.ranks(2)
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    run = Run((2, 1)).train(0)
    with pytest.raises(ValueError, match="saving a model whose replicas train apart"):
        checkpoint.save(tmp_path / "saved", {"model": run.model})
    with pytest.raises(ValueError, match="saving an Outer takes the model too"):
        checkpoint.save(tmp_path / "saved", {"outer": run.outer})
    with pytest.raises(TypeError, match="'outer' must be an fsdpc.Outer"):
        checkpoint.save(tmp_path / "saved", {"model": run.model, "outer": run.ema})
    checkpoint.save(tmp_path / "saved", run.state)
    assert "outer" in checkpoint.inspect(tmp_path / "saved").states
    with pytest.raises(ValueError, match="loading a model whose replicas train apart"):
        checkpoint.load(tmp_path / "saved", {"model": run.model})
    plain = build(False)
    optimizer = fsdpc.optim.AdamW(plain.parameters())
    with pytest.raises(CheckpointError, match="states are those of 2 replicas that train apart"):
        checkpoint.load(tmp_path / "saved", {"model": plain, "optimizer": optimizer})
    checkpoint.save(tmp_path / "plain", {"model": plain})
    with pytest.raises(CheckpointError, match="it has no outer: load only the model, before"):
        checkpoint.load(tmp_path / "plain", {"model": run.model, "outer": run.outer})
    with pytest.raises(CheckpointError, match=r"outer_momentum"):
        checkpoint.load(tmp_path / "saved", Run((2, 1), momentum=0.0, nesterov=False).state)


@pytest.mark.ranks(4)
def test_the_model_is_the_anchors(tmp_path: Path) -> None:
    """It loads into any model, without the replicas' own values."""
    run = Run((2, 2)).train(*range(4))
    anchors = parameters(run.model)
    run.train(4, 5)
    checkpoint.save(tmp_path / "saved", run.state)
    for other in (build(False), build(True)):
        checkpoint.load(tmp_path / "saved", {"model": other})
        assert_same(parameters(other), anchors)


@pytest.mark.ranks(4)
def test_replicas_must_have_the_same_anchors(tmp_path: Path) -> None:
    run = Run((2, 2)).train(0)
    p = next(iter(run.model.parameters()))
    if fsdpc.rank() == 2:
        run.outer.optimizer.state_views(p)["anchor"].fill_(1.0)
    with pytest.raises(fsdpc.MismatchError, match="replicas drifted apart"):
        checkpoint.save(tmp_path / "saved", run.state)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch_optim.AdamW])
def test_torch(make: Any, tmp_path: Path) -> None:
    """The same, and the native frontend reads it."""

    def run(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = fully_shard(torch.nn.Linear(8, 6), mesh=fsdpc.init_device_mesh("cpu", (2, 2)))
        return model, make(model.parameters(), lr=0.1), Outer(model, every=3)

    def train(model: Any, optimizer: Any, outer: Any, steps: range) -> None:
        for step in steps:
            (model(torch.full((1, 8), step + fsdpc.rank() + 1.0)) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()

    first, second = run(0), run(1)
    train(*first, range(5))
    names = ("model", "optimizer", "outer")
    checkpoint.save(tmp_path / "saved", dict(zip(names, first, strict=True)))
    checkpoint.load(tmp_path / "saved", dict(zip(names, second, strict=True)))
    for each in (first, second):
        train(*each, range(5, 8))
    for p, q in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())
    native = nn.Linear(8, 6)
    checkpoint.load(tmp_path / "saved", {"model": native})
