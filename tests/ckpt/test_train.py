"""``fsdpc train --checkpoint``: resumed runs end as whole ones do; signals save."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--sample", "0", "--eval-bytes", "0"]
SMALL = ["--batch", "2", "--seq", "32", *QUICK, "--data", str(ROOT / "docs")]


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "fsdpc", "train", *SMALL, *map(str, options)]


def train(*options: object) -> str:
    done = subprocess.run(command(*options), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def crc(output: str) -> str:
    return re.search(r"parameters crc32c (\w+)", output).group(1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "run.toml")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_ends_as_a_whole_one(ranks: int, tmp_path: Path) -> None:
    options = ("--ranks", ranks, "--steps", 6)
    whole = train(*options)
    folder = tmp_path / "run"
    first = train(*options, "--checkpoint", folder, "--save-every", 2, "--keep", 2)
    assert names(folder) == ["step-00000004", "step-00000006"]
    (folder / "step-00000006" / "manifest.json").unlink()  # as if the last one was not committed
    again = train(*options, "--checkpoint", folder, "--save-every", 2, "--resume")
    assert "resumed after step 4" in again
    assert crc(whole) == crc(first) == crc(again)
    assert names(folder) == ["step-00000004", "step-00000006"]


def test_resumed_at_another_number_of_ranks(tmp_path: Path) -> None:
    """The run goes on with the step and the place in the data where it was."""
    folder = tmp_path / "run"
    train("--ranks", 1, "--steps", 2, "--checkpoint", folder)
    text = train("--ranks", 2, "--steps", 4, "--checkpoint", folder, "--resume")
    assert "resumed after step 2" in text
    train("--ranks", 3, "--steps", 5, "--checkpoint", tmp_path / "three")
    text = train("--ranks", 2, "--steps", 7, "--checkpoint", tmp_path / "three", "--resume")
    assert "resumed after step 5" in text  # 30 sequences, inside a batch of 4
    text = train("--ranks", 1, "--steps", 6, "--checkpoint", folder, "--resume")
    assert "resumed after step 4" in text
    assert names(folder) == [f"step-{step:08}" for step in (2, 4, 6)]


def test_a_resume_that_has_nothing_to_do_removes_what_a_killed_save_left(tmp_path: Path) -> None:
    """As a run that ended its last step and was killed in the save after it, at fewer steps."""
    options = ("--steps", 2, "--checkpoint", tmp_path)
    train(*options)
    (tmp_path / ".step-00000030.saving").mkdir()
    (tmp_path / ".lock").touch()
    assert "resumed after step 2" in train(*options, "--resume")
    assert names(tmp_path) == ["step-00000002"]


def test_a_resume_with_another_model_is_refused_by_a_short_table(tmp_path: Path) -> None:
    train("--steps", 1, "--checkpoint", tmp_path, "--preset", "2M")
    done = subprocess.run(
        command("--steps", 2, "--checkpoint", tmp_path, "--preset", "10M", "--resume"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert re.search(r"parameter +saved +now", done.stderr), done.stderr
    assert re.search(r"layers.\*.\S+' \(4 of them\) +\(512, 192\) +\(864, 320\)", done.stderr)
    assert len(lines) < 30, done.stderr


def test_steps_0_saves_the_initial_state(tmp_path: Path) -> None:
    train("--steps", 0, "--checkpoint", tmp_path / "run")
    assert names(tmp_path / "run") == ["step-00000000"]
    done = subprocess.run(
        command("--steps", 1, "--checkpoint", tmp_path / "run"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and "add --resume" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda each: each.name)
def test_a_signal_saves(signum: signal.Signals, ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--ranks", ranks, "--steps", 5000, "--checkpoint", folder, "--save-every", 1000)
    options += ("--max-restarts", ranks - 1)
    with subprocess.Popen(
        command(*options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "step 1/5000" in line:
                os.kill(process.pid, signum)
        code = process.wait(60)
    text = "".join(lines)
    assert re.search(rf"stopped by {signum.name} after step (\d+)", text), text
    assert code == 0 and "start again" not in text, text
    assert len(names(folder)) == 1 and "step-" in names(folder)[0], text


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children]


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_a_run_whose_ranks_are_killed_ends_as_an_undisturbed_one(
    kills: int, tmp_path: Path
) -> None:
    """At random moments once the newest start has saved a step."""
    steps, folder = 10 * kills, tmp_path / "run"
    options = ("--ranks", 2, "--steps", steps, "--deterministic")
    whole = train(*options)
    again = ("--checkpoint", folder, "--save-every", 1, "--keep", 2, "--max-restarts", kills)
    chance = random.Random(kills)
    killed, saved = 0, ""
    with (
        open(tmp_path / "out", "w+") as out,
        subprocess.Popen(command(*options, *again), stdout=out, stderr=out) as process,
    ):
        while process.poll() is None:
            time.sleep(0.01)
            newest = max(folder.glob("step-*"), default=folder).name
            if killed == kills or newest <= saved or not newest.startswith("step"):
                continue
            time.sleep(chance.random() * 0.15)
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(chance.choice(ranks_of(process.pid)), signal.SIGKILL)
                killed, saved = killed + 1, newest
        text = (tmp_path / "out").read_text()
    assert process.returncode == 0, text
    assert 0 < text.count("start again") <= killed, text
    assert crc(text) == crc(whole)


def test_options_that_need_each_other() -> None:
    done = subprocess.run(command("--resume"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "need --checkpoint" in done.stderr
    for more in ([], ["--checkpoint", "run"]):
        words = command("--max-restarts", 2, *more)
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and "--save-every N to go on from" in done.stderr
