"""``fsdpc train``: strategies, meshes and splits of one global batch end with the same bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpc.data import GlobalBatchSampler

DATA = Path(__file__).parents[2] / "docs"


def records_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """Train a little and return what was measured, without times."""
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-m", "fsdpc", "train", "--steps", "2", "--batch", "1"]
    command += ["--seq", "48", "--sample", "0", "--eval-bytes", "0", "--data", str(DATA)]
    command += ["--metrics", str(metrics), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr + done.stdout
    keys = ("loss", "grad_norm", "val_loss", "val_bits_per_byte", "params_crc32c")
    records = map(json.loads, metrics.read_text().splitlines())
    return [{key: record[key] for key in keys if key in record} for record in records]


def crc_of(tmp_path: Path, *options: str) -> str:
    """Return the checksum of the parameters at the end."""
    return records_of(tmp_path, *options)[-1]["params_crc32c"]


def test_deterministic_splits_end_equal(tmp_path: Path) -> None:
    """Losses, norms and validation too."""
    splits = [("1", "6"), ("2", "3"), ("3", "2"), ("6", "1")]
    found = [
        records_of(tmp_path, "--deterministic", "--eval-bytes", "480",
                   "--ranks", ranks, "--accumulate", micro, *more)
        for ranks, micro in splits
        for more in ([], ["--strategy", "no_shard"])[: 2 if ranks == "3" else 1]
    ]  # fmt: skip
    assert len(found) == 5 and all(each == found[0] for each in found)
    assert {"loss", "grad_norm"} == found[0][0].keys() and "val_loss" in found[0][-1]
    half = ["--deterministic", "--dtype", "fp16"]
    one, three = (crc_of(tmp_path, *half, "--ranks", n, "--accumulate", m) for n, m in splits[::2])
    assert one == three


def test_strategies_end_equal(tmp_path: Path, disk: Path) -> None:
    strategies = [
        [],
        ["--offload", f"params=disk:{disk},masters=disk,optimizer=disk,gradients=disk"],
        ["--offload", f"masters=disk:{disk},optimizer=disk:{disk},fraction=0.5"],
        ["--strategy", "SHARD_GRAD_OP"],
        ["--strategy", "hybrid_shard", "--mesh", "2x1"],
        ["--reshard-after-forward", "true"],
    ]
    assert len({crc_of(tmp_path, "--ranks", "2", *more) for more in strategies}) == 1


def test_muon_splits_and_resumes_equal(tmp_path: Path) -> None:
    """Whatever the ranks and the strategy, and also from a checkpoint of others."""
    common = ["--deterministic", "--optimizer", "muon"]
    found = {
        crc_of(tmp_path, *common, "--ranks", ranks, "--accumulate", micro, *more)
        for ranks, micro, *more in (
            ("1", "4"), ("2", "2"), ("4", "1"), ("2", "2", "--strategy", "no_shard"),
            ("4", "1", "--mesh", "2x2", "--strategy", "hybrid_shard"),
        )
    }  # fmt: skip
    run, other = tmp_path / "run", tmp_path / "other"
    whole = [*common, "--steps", "4", "--save-every", "2", "--checkpoint", str(run)]
    begun = crc_of(tmp_path, *whole, "--ranks", "2", "--accumulate", "2")
    shutil.copytree(run / "step-00000002", other / "step-00000002")
    whole[-1] = str(other)
    whole += ["--ranks", "4", "--accumulate", "1", "--resume"]
    assert len(found) == 1 and begun == crc_of(tmp_path, *whole)
    with pytest.raises(AssertionError, match="muon's states are fp32"):
        crc_of(tmp_path, *common, "--state-dtype", "bf16")


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--mesh", "2", "a mesh is written as 2x4, got '2'"),
        ("--strategy", "zero", "invalid choice: 'ZERO'"),
        ("--reshard-after-forward", "maybe", "true, false or a number of ranks, got 'maybe'"),
    ],
)
def test_bad_options_are_named(option: str, value: str, wanted: str) -> None:
    command = [sys.executable, "-m", "fsdpc", "train", option, value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert wanted in done.stderr


def test_global_batches_do_not_depend_on_the_split() -> None:
    whole = GlobalBatchSampler(103, 0, 1, batch=3, accumulate=4, seed=5)
    assert len(whole) == 96
    blocks = whole.indices().reshape(-1, 4, 3)
    for world in (2, 4):
        for rank in range(world):
            part = GlobalBatchSampler(103, rank, world, 3, 4 // world, seed=5)
            mine = part.indices().reshape(-1, 4 // world, 3)
            np.testing.assert_array_equal(mine, blocks[:, rank::world])
    with pytest.raises(ValueError, match="fewer than a global batch of 24"):
        GlobalBatchSampler(20, 0, 2, batch=3, accumulate=4)


def test_averages_are_validated_and_resumed(tmp_path: Path) -> None:
    """The same training; other losses of validation, which a resumed run has as well."""
    common = ["--steps", "4", "--eval-bytes", "480", "--eval-every", "2", "--ranks", "2"]
    plain = records_of(tmp_path, *common)
    saved = [*common, "--checkpoint", str(tmp_path / "run"), "--save-every", "2"]
    found = records_of(tmp_path, *saved, "--ema", "0.5")
    assert [r.get("loss") for r in found] == [r.get("loss") for r in plain]
    assert found[-1]["params_crc32c"] == plain[-1]["params_crc32c"]
    assert found[-1]["val_loss"] != plain[-1]["val_loss"]
    shutil.rmtree(tmp_path / "run" / "step-00000004")
    assert records_of(tmp_path, *saved, "--resume")[-1] == found[-1]  # the option is kept
