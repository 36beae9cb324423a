"""Options of ``fsdpc train``: schedules, configurations, validation, loggers, skipped steps."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpc import nn
from fsdpc.cli.train_config import as_toml, with_config
from fsdpc.cli.train_options import make_schedule, parser
from fsdpc.optim import AdamW

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is Python 3.11's")
SMALL = [
    "--batch",
    "2",
    "--seq",
    "32",
    "--sample",
    "0",
    "--data",
    str(Path(__file__).parents[2] / "docs"),
]


def train(*options: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "fsdpc", "train", *SMALL, *map(str, options)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=cwd)


def rates(*words: str) -> list[float]:
    options = parser().parse_args(words)
    optimizer = AdamW(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule, found = make_schedule(options, optimizer), []
    for _ in range(options.steps):
        found += schedule.get_last_lr()
        schedule.step()
    return found


def test_schedules_are_those_that_are_named() -> None:
    usual = rates("--steps", "20")
    assert usual[0] == 1.0 and usual[19] == pytest.approx(0.05, abs=0.02)  # one step of warm-up
    wsd = rates("--steps", "20", "--schedule", "wsd", "--warmup", "4", "--decay", "5",
                "--min-lr-ratio", "0.5")  # fmt: skip
    assert wsd[:4] == [0.25, 0.5, 0.75, 1.0] and wsd[4:16] == [1.0] * 12
    assert wsd[16:] == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert rates("--steps", "1", "--schedule", "linear") == [1.0]


@needs_toml
def test_a_configuration_goes_behind_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('steps = 7\nlr = 0.5\nstabilize = true\ndeterministic = false\n'
                    'reshard_after_forward = false\nbetas = [0.5, 0.75]\n'
                    'offload = "optimizer=disk:/x"\nmesh = "1x2"\nprofile = "3"\n')  # fmt: skip
    options = parser().parse_args(with_config(["--config", str(path), "--lr", "0.25"]))
    assert (options.steps, options.lr, options.betas) == (7, 0.25, [0.5, 0.75])
    assert options.stabilize and not options.deterministic
    assert options.reshard_after_forward is False and options.mesh == (1, 2)
    assert options.profile == range(4, 7)
    path.write_text(as_toml(options))
    again = parser().parse_args(with_config(["--config", str(path)]))
    assert {**vars(again), "config": None} == {**vars(options), "config": None}


@needs_toml
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = [", "Invalid value"),
        ("[model]\na = 1\n", "'model' is no option"),
        ("nonsense = 3\n", "unrecognized arguments: --nonsense 3"),
        ("steps = 'many'\n", "--steps: invalid int value: 'many'"),
    ],
)
def test_a_configuration_that_is_none(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    done = train("--config", tmp_path / "run.toml")
    assert done.returncode == 2 and why in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--decay", 3], "--decay is of the WSD schedules"),
        (["--betas", 2, 3], "--betas must be in [0, 1)"),
        (["--betas", 0.9, 0.9, "--optimizer", "sgd"], "sgd has none"),
        (["--stabilize", "--dtype", "fp16"], "does not go with fp16"),
        (["--eval-every", 0], "--eval-every must be at least 1"),
        (["--min-lr-ratio", 2], "must be in [0, 1]"),
        (["--profile", "9:8"], "steps are written as 10:12, or as 3, got '9:8'"),
        (["--profile", 3, "--steps", 5], "--profile 4:6, and there are --steps 5"),
        (["--profile", 3, "--profile-file", "/dev/null/x"], "cannot write --profile-file"),
        (["--save-hours", 0, "--checkpoint", "run"], "--save-hours must be above 0"),
        (["--ranks", 2, "--log", "csv:a,xml:b"], "--log csv:a,xml:b: 'xml:b': one of jsonl, csv"),
        (["--ranks", 2, "--log", "csv"], "--log csv: 'csv': say where to, as in csv:PATH"),
    ],
)
def test_what_cannot_be(options: list[object], why: str) -> None:
    done = train(*options)
    assert done.returncode == 2 and done.stderr.count(why) == 1, done.stderr
    assert not done.stdout  # no rank has started


def test_validation_and_loggers_while_it_trains(tmp_path: Path) -> None:
    done = train("--ranks", 2, "--steps", 5, "--eval-every", 2, "--eval-bytes", 256, "--metrics",
                 "run.jsonl", "--log", "csv:run.csv", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = r"validation loss (\S+) nats per byte, (\S+) bits"
    seen = re.findall(rf"step (\d): {said}\n", done.stdout)
    assert [step for step, *_ in seen] == ["2", "4"]
    for _, loss, bits in seen:
        assert float(bits) == pytest.approx(float(loss) / math.log(2), abs=2e-3)
    last = re.search(rf"\] {said}, perplexity (\S+)\n", done.stdout)
    assert last and float(last[3]) == pytest.approx(math.exp(float(last[1])), rel=2e-3)
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "val_loss" in r and "step" in r] == [2, 4]
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["loss"]] == ["1", "2", "3", "4", "5"]
    assert [row["step"] for row in rows if row["val_perplexity"]] == ["2", "4", "5"]


def test_validating_meanwhile_changes_no_bit() -> None:
    options = ("--ranks", 2, "--steps", 4, "--eval-bytes", 128)
    found = [train(*options), train(*options, "--eval-every", 1)]
    crcs = [re.search(r"crc32c (\w+)", done.stdout).group(1) for done in found]
    assert crcs[0] == crcs[1]


@needs_toml
def test_a_run_that_stays_bad_goes_back_and_gives_up(tmp_path: Path) -> None:
    """At a learning rate beyond all bounds."""
    options = ("--steps", 60, "--lr", 1e6, "--warmup", 0, "--eval-bytes", 0, "--stabilize")
    done = train(*options)
    assert done.returncode == 2 and "no --checkpoint to go back to" in done.stderr, done.stderr
    folder = tmp_path / "run"
    done = train(*options, "--checkpoint", folder, "--save-every", 1, "--keep", 2)
    assert "step skipped (3 in a row" in done.stderr
    assert done.returncode == 2 and "3 times it went back to step" in done.stderr, done.stderr
    assert "lr = 1000000.0\n" in (folder / "run.toml").read_text()
