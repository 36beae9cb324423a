"""Loggers: what is written, by rank 0 alone, and that a kill after a call loses nothing."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing import event_accumulator

import fsdpc
from fsdpc.monitor.loggers import Csv, JsonLines, Loggers, MLflow, TensorBoard, open_loggers


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.jsonl"
    with JsonLines(path) as log:
        log.log(1, {"loss": fsdpc.tensor(2.5), "norm": math.inf, "note": "a\nb", "n": 3})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # cut off by a full disk
    with JsonLines(path) as log:
        log.log(3, {"loss": 1})
    first, cut, last = path.read_text().splitlines()
    seen = json.loads(first)
    assert seen.pop("time") > 1e9
    assert seen == {"step": 1, "loss": 2.5, "norm": None, "note": "a\nb", "n": 3}
    assert cut == '{"step": 2, "lo' and json.loads(last)["loss"] == 1


def test_a_table_widens(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with Csv(path) as log:
        log.log(1, {"loss": 2.5})
        log.log(2, {"loss": 2.0, "note": 'a "b", c'})
        log.log(3, {"note": "d"})
    with Csv(path) as log:
        log.log(4, {"loss": 1.0})
    assert [list(row.values()) for row in rows(path)] == [
        ["1", "2.5", ""], ["2", "2.0", 'a "b", c'], ["3", "", "d"], ["4", "1.0", ""],
    ]  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["run.csv"]


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = event_accumulator.EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_an_event_file_is_tensorboards(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as log:
        log.log(7, {"loss": 2.5, "note": "left out", "n": 3})
        log.log(300, {"loss": math.nan})
    assert scalars(tmp_path, "n") == [(7, 3)]
    first, second = scalars(tmp_path, "loss")
    assert first == (7, 2.5) and second[0] == 300 and math.isnan(second[1])


def test_tensorboards_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        open_loggers("tensorboard:board")


KILLED = """
import os, sys
from fsdpc.monitor.loggers import open_loggers
log = open_loggers("jsonl:run.jsonl,csv:run.csv,tensorboard:board,mlflow:ml")
for step in range(3):
    log.log(step, {"loss": float(step), f"late {step}": 1.0})
os.kill(os.getpid(), 9)
"""


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    path = str(Path(fsdpc.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert [line["loss"] for line in lines(tmp_path / "run.jsonl")] == [0, 1, 2]
    assert [row["loss"] for row in rows(tmp_path / "run.csv")] == ["0.0", "1.0", "2.0"]
    assert scalars(tmp_path / "board", "loss") == [(0, 0), (1, 1), (2, 2)]
    (metrics,) = (tmp_path / "ml").glob("*/*/metrics")
    assert [line.split()[1:] for line in (metrics / "loss").read_text().splitlines()] == [
        ["0.0", "0"], ["1.0", "1"], ["2.0", "2"]
    ]  # fmt: skip
    assert (metrics / "late 2").exists()


@pytest.mark.ranks(2)
def test_rank_0_alone_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    own = f"{tmp_path}/{fsdpc.rank()}"
    with open_loggers(f"jsonl:{own}/a,csv:{own}/b,mlflow:{own}/c") as log:
        log.log(1, {"loss": 1.0})
    fsdpc.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["0"]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["a", "b", "c"]


def test_lines_of_options() -> None:
    kinds = [type(each) for each in open_loggers("csv:a, jsonl:b,tensorboard:c").loggers]
    assert kinds == [Csv, JsonLines, TensorBoard]
    with pytest.raises(ValueError, match="'xml:a': one of jsonl, csv, tensorboard, wandb, mlflow"):
        open_loggers("xml:a")
    with pytest.raises(ValueError, match="'csv': say where to, as in csv:PATH"):
        open_loggers("csv")


def test_wandb_gets_each_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_loggers("wandb:trial") as log:
        log.log(1, {"loss": 2.5})
        log.log(2, {"loss": 2.25})
    (data,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    until = time.monotonic() + 60  # its own process writes, and may after finish() has returned
    while b"2.25" not in data.read_bytes() and time.monotonic() < until:
        time.sleep(0.05)
    assert b"2.25" in data.read_bytes()


def test_mlflow_goes_on_with_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    folder = tmp_path / "a folder"
    with MLflow(folder) as log:
        run, client = log.run, log._client
        log.log(1, {"loss": fsdpc.tensor(2.5), "note": "left out", "n": 3})
    assert client.get_run(run).info.status == "FINISHED"
    assert client.get_experiment_by_name("fsdpc") is not None
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    with open_loggers(f"mlflow:{folder}") as log:
        assert client.get_run(run).info.status == "RUNNING"
        log.log(2, {"loss": math.nan})
    history = client.get_metric_history(run, "loss")
    assert [(each.step, each.value) for each in history][:1] == [(1, 2.5)]
    assert history[1].step == 2 and math.isnan(history[1].value) and history[0].timestamp > 1e12
    assert client.get_run(run).data.metrics["n"] == 3
    monkeypatch.delenv("MLFLOW_RUN_ID")
    with MLflow(folder) as other:  # of the same experiment
        assert other.run != run
        assert len(client.search_experiments()) == 2  # the default one is MLflow's own


def test_without_mlflow_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install mlflow-skinny, or log to jsonl:FILE"):
        open_loggers("mlflow:runs")


def test_without_wandb_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb, or log to jsonl:FILE"):
        open_loggers("wandb")
    assert Loggers([]).loggers == []
