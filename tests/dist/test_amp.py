"""float16 over ranks: overflows agreed on, the training of float32 found again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core
from fsdpc.sharding.amp import LossScaler
from tests.events import event_counts

from .common import LR, assert_same, batch, build, parameters

STEPS, SLOW = 40, 2e-3


def step(model: Any, optimizer: Any, scaler: LossScaler, number: int, clip: bool = True) -> Any:
    """One step on words that repeat; (loss, taken, norm)."""
    loss = model(*batch(number % 2, fsdpc.rank()))
    scaler.scale(loss).backward()
    norm = math.nan
    if clip:
        scaler.unscale_(optimizer)
        norm = float(fsdpc.clip_grad_norm_(model, 1.0))
    taken = scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(loss), taken, norm


def in_float32(taken: list[bool]) -> list[float]:
    """Losses of a run without a scaler that leaves out the steps that were not taken."""
    model = build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=SLOW)
    losses = []
    for number, take in enumerate(taken):
        loss = model(*batch(number % 2, fsdpc.rank()))
        loss.backward()
        losses.append(float(loss))
        fsdpc.clip_grad_norm_(model, 1.0)
        if take:
            optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.ranks([1, 2])
def test_fp16_training_overflows_shrinks_and_learns() -> None:
    model = build(sharded=True, param_dtype=fsdpc.float16, reduce_dtype=fsdpc.float32)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=SLOW)
    scaler = LossScaler(initial_scale_power=26)
    losses, taken, scales = [], [], []
    for number in range(STEPS):
        loss, took, norm = step(model, optimizer, scaler, number)
        assert took == math.isfinite(norm)
        losses.append(loss)
        taken.append(took)
        scales.append(scaler.get_scale())
    skipped = taken.count(False)
    assert not any(taken[:3]) and skipped < 16  # overflows at first, later hardly
    assert scales[:3] == [2.0**26, 2.0**25, 2.0**24]  # forgiven once
    assert scales[-1] == 2.0 ** (27 - skipped)
    assert (fsdpc.all_gather(np.array([taken, scales])) == np.array([taken, scales])).all()
    assert losses[0] == losses[2] and losses[-1] < 0.7 * losses[0]
    # float16 rounds weights and activations to 11 bits, 5e-4 a value; the mean of many is nearer
    np.testing.assert_allclose(losses, in_float32(taken), rtol=2e-3)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.ranks([2, 3])
def test_an_overflow_on_one_rank_skips_on_all(clip: bool) -> None:
    model = build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=LR)
    scaler = LossScaler(8, hysteresis=1)
    step(model, optimizer, scaler, 0, clip)
    before = parameters(model)
    last = fsdpc.rank() == fsdpc.world_size() - 1
    (scaler.scale(model(*batch(1, fsdpc.rank()))) * (math.inf if last else 1.0)).backward()
    if clip:
        scaler.unscale_(optimizer)
        assert not math.isfinite(float(fsdpc.clip_grad_norm_(model, 1.0)))
    assert scaler.step(optimizer) is False
    scaler.update()
    assert scaler.get_scale() == 128
    assert_same(parameters(model), before)
    optimizer.zero_grad()
    assert step(model, optimizer, scaler, 2, clip)[1]
    assert parameters(model).keys() == before.keys()
    assert any((parameters(model)[n] != before[n]).any() for n in before)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.ranks([2])
def test_a_power_of_two_changes_no_bit(clip: bool) -> None:
    """Sharded fp32 training with a scale and without: the same parameters."""
    plain = build(sharded=True)
    scaled = build(sharded=True)
    ours = fsdpc.optim.AdamW(plain.parameters(), lr=LR)
    theirs = fsdpc.optim.AdamW(scaled.parameters(), lr=LR)
    scaler = LossScaler(12)
    for number in range(3):
        plain(*batch(number % 2, fsdpc.rank())).backward()
        norm = float(fsdpc.clip_grad_norm_(plain, 1.0)) if clip else math.nan
        ours.step()
        ours.zero_grad()
        found = step(scaled, theirs, scaler, number, clip)
        assert found[1]
        assert not clip or found[2] == norm
    assert_same(parameters(plain), parameters(scaled))


@pytest.mark.ranks([2])
def test_one_collective_with_clipping_and_without() -> None:
    model = build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    scaler = LossScaler(8)
    for clip in (True, False, True):
        _core.trace_reset()
        step(model, optimizer, scaler, 0, clip)
        assert event_counts()["collective"] == 1


@pytest.mark.ranks([2])
def test_a_norm_of_some_units_leaves_the_others_to_be_measured() -> None:
    model = build(sharded=True)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=LR)
    scaler = LossScaler(8, hysteresis=1)
    first, second = model.blocks()[0], model.blocks()[1]
    scaler.scale(model(*batch(0, fsdpc.rank()))).backward()
    scaler.unscale_(optimizer)
    if fsdpc.rank() == 1:
        for p in second.parameters():
            p.grad.numpy()[...] = math.nan  # of some, this rank has no rows
    assert math.isfinite(float(fsdpc.clip_grad_norm_(first.parameters(), 1.0)))
    assert scaler.step(optimizer) is False
    scaler.update()
    assert scaler.get_scale() == 128


@pytest.mark.ranks([2])
def test_ignored_gradients_overflow_for_all_ranks() -> None:
    """They are not reduced: what one rank finds in its own must stop the others too."""
    model = fsdpc.nn.Sequential(fsdpc.nn.Linear(3, 3), fsdpc.nn.Linear(3, 1))
    fsdpc.fully_shard(model, ignored_params=[model[1].bias])
    optimizer = fsdpc.optim.AdamW(model.parameters())
    scaler = LossScaler(8, hysteresis=1)
    for bad in (True, False):
        x = fsdpc.tensor(np.ones((2, 3), np.float32))
        scaler.scale(model(x).sum()).backward()
        if bad and fsdpc.rank() == 0:
            model[1].bias.grad.numpy()[...] = math.inf
        assert scaler.step(optimizer) is not bad
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 128


def test_fsdpc_train_in_fp16(tmp_path: Path) -> None:
    """It learns, says its scale, and writes what any JSON reader takes, of skipped steps too."""
    text, metrics = tmp_path / "text.txt", tmp_path / "metrics.jsonl"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    command = [sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--dtype", "fp16"]
    command += ["--data", str(text), "--steps", "12", "--batch", "2", "--seq", "64"]
    command += ["--sample", "0", "--lr", "3e-3", "--metrics", str(metrics)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in metrics.open()]
    steps = lines[:-1]
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"] and lines[-1]["val_loss"] < steps[0]["loss"]
    scale, forgiving = 65536.0, 2
    for line in steps:
        if line["grad_norm"] is None:  # overflowed
            scale, forgiving = (scale / 2, 1) if forgiving == 1 else (scale, 1)
        assert line["loss_scale"] == scale
    assert sum(line["grad_norm"] is not None for line in steps) >= 8
