"""Saved tensors on a disk: the bits of a run in memory, and the bytes of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import functional as F
from fsdpc import nn

WIDTH, BLOCKS = 48, 5
BATCH = (4, 16, WIDTH)
BF16 = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.RMSNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def blocks(self) -> list[Any]:
        return list(self.layers)

    def forward(self, x: Any) -> Any:
        for block in self.layers:
            x = block(x)
        return (self.head(x) ** 2).mean()


def policy_of(folder: Path, fraction: float = 1.0) -> fsdpc.OffloadPolicy:
    return fsdpc.OffloadPolicy(activations="disk", path=folder, fraction=fraction)


def build(policy: Any, which: Any = None, mp_policy: Any = None) -> Any:
    """The model, with blocks that recompute if `which` says so."""
    fsdpc.manual_seed(3)
    model = Net()
    if which is not None:
        fsdpc.checkpoint_activations(model.blocks(), which)
    options = {"mp_policy": mp_policy, "offload_policy": policy}
    for block in model.layers:
        fsdpc.fully_shard(block, **options)
    return fsdpc.fully_shard(model, **options)


def batch(step: int) -> Any:
    rng = np.random.default_rng([step, fsdpc.rank()])
    return fsdpc.tensor(rng.standard_normal(BATCH).astype(np.float32))


def train(model: Any, steps: int = 2) -> list[Any]:
    """Losses and weights; the last step's micro-batches have two forwards before any backward."""
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    fsdpc.manual_seed(4)
    seen = []
    for step in range(steps):
        losses = [model(batch(step))]
        if step == steps - 1:
            losses.append(model(batch(step + 100)))
        for loss in losses:
            loss.backward()
            seen.append(float(loss))
        del loss, losses
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(fsdpc.full_tensor(p).numpy().tobytes() for p in model.parameters())]


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "inputs": {"which": "all"},
    "inputs of some": {"which": 2},
    "parts": {"which": lambda m: isinstance(m, nn.RMSNorm)},
    "bf16": {"mp_policy": BF16},
}


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_bits_are_those_of_memory(case: str, disk: Path) -> None:
    expected = train(build(None, **CASES[case]))
    for fraction in (1.0, 0.4):
        assert train(build(policy_of(disk, fraction), **CASES[case])) == expected


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_plans_are_what_runs_use(case: str, disk: Path) -> None:
    """Memory, and bytes of the file; fewer than without, and from the second step the same."""
    peaks = []
    for policy in (None, policy_of(disk, 0.6), policy_of(disk)):
        before = fsdpc.memory_stats()
        model = build(policy, **CASES[case])
        plan = fsdpc.memory_plan(model, batch_shape=BATCH)
        for step in range(3):
            fsdpc.reset_peak_memory_stats()
            model(batch(step)).backward()
            stats = fsdpc.memory_stats()
            assert stats["activation_peak_bytes"] - before["activation_bytes"] == plan.activation
            assert stats["disk_file_bytes"] - before["disk_file_bytes"] == plan.file
            assert stats["staging_bytes"] - before["staging_bytes"] == plan.staging
            model.zero_grad()
        peaks.append((plan.activation, plan.file))
        del model
    assert peaks[0][0] > peaks[1][0] > peaks[2][0] or case != "all"
    assert peaks[2][0] < peaks[0][0] and 0 == peaks[0][1] < peaks[1][1] < peaks[2][1]


@pytest.mark.ranks(1)
def test_plans_of_models_that_are_not_sharded(disk: Path) -> None:
    model = Net()
    plan = {"layers.*": {}}
    options = {"plan": plan, "offload_policy": policy_of(disk)}
    found = fsdpc.memory_plan(model, batch_shape=BATCH, **options)
    assert found.file > 0 and all("forward" not in b.__dict__ for b in model.layers)
    fsdpc.fully_shard(model, **options)
    assert fsdpc.memory_plan(model, batch_shape=BATCH) == found


@pytest.mark.ranks(1)
def test_graphs_that_are_kept_or_dropped(disk: Path) -> None:
    """Two backwards through one graph; then graphs that no backward uses, and a failing one."""
    model = build(policy_of(disk))
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    first = [p.grad.numpy().copy() for p in model.parameters()]
    loss.backward()
    for p, grad in zip(model.parameters(), first, strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), 2 * grad)
    del loss
    size = fsdpc.memory_stats()["disk_file_bytes"]
    for _ in range(3):
        model(batch(0))
        with pytest.raises(ValueError, match="shape"):
            model(fsdpc.zeros(4, 16, WIDTH + 1))
    assert fsdpc.memory_stats()["disk_file_bytes"] == size
    assert fsdpc.memory_stats()["activation_bytes"] < 2**16


@pytest.mark.ranks(1)
def test_inputs_of_checkpoints_that_were_changed() -> None:
    """Recomputing from other values would be silent."""
    layer = nn.Linear(4, 4)
    x = fsdpc.ones(2, 4)
    y = F.checkpoint(layer, x).sum()
    x += 1
    with pytest.raises(RuntimeError, match="was changed in place since"):
        y.backward()


@pytest.mark.ranks(1)
def test_plans_forget_those_that_failed(disk: Path) -> None:
    model = build(policy_of(disk))
    plan = fsdpc.memory_plan(model, batch_shape=BATCH)
    handle = model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fsdpc.memory_plan(model, batch_shape=(64, 16, WIDTH))
    handle.remove()
    assert fsdpc.memory_plan(model, batch_shape=BATCH) == plan


@pytest.mark.ranks(1)
def test_fewer_modules_recompute(disk: Path) -> None:
    """What leaves needs no memory, so a model fits as it is."""
    model = Net()
    plain = fsdpc.memory_plan(model, batch_shape=BATCH).activation
    policy = {"offload_policy": policy_of(disk)}
    moved = fsdpc.memory_plan(model, batch_shape=BATCH, plan={"layers.?": {}}, **policy).activation
    fitted = fsdpc.fit_activations(model, BATCH, (moved + plain) / 2, **policy)
    assert fitted.modules == () and fitted.peak == moved < plain
    assert fsdpc.fit_activations(model, BATCH, (moved + plain) / 2).modules


@pytest.mark.ranks(1)
def test_a_folder_that_is_missing_can_be_made(disk: Path) -> None:
    layer, folder = nn.Linear(4, 4), disk / "later"
    with pytest.raises(OSError, match="cannot offload to the folder"):
        fsdpc.fully_shard(layer, offload_policy=policy_of(folder))
    folder.mkdir()
    fsdpc.fully_shard(layer, offload_policy=policy_of(folder))


@pytest.mark.ranks(1)
def test_what_cannot_leave_is_refused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fsdpc.fully_shard(nn.Linear(4, 4), offload_policy=policy_of(disk))
    with pytest.raises(ValueError, match=r"unit .*\(FSDPLinear\) cannot leave: they"):
        model(fsdpc.ones(1, 4))
    with pytest.raises(ValueError, match=r"\(Linear\) cannot leave: they do when the forward of"):
        fsdpc.memory_plan(nn.Linear(4, 4), 1, (1, 4), offload_policy=policy_of(disk))
    monkeypatch.setattr("fsdpc.sharding.fully_shard.get_default_device", lambda: "cuda")
    with pytest.raises(NotImplementedError, match="'disk' where ranks compute on cuda: they can"):
        fsdpc.fully_shard(nn.Linear(4, 4), offload_policy=policy_of(disk))
