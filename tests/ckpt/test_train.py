"""``fsdpc train --checkpoint``: resumed runs end as whole ones do; signals save."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc import checkpoint, models
from fsdpc.checkpoint import CheckpointError, manifest
from fsdpc.cli import train_config

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


IN_LOW_RANK = ["--strategy", "NO_SHARD", "--compress", "replicas=powersgd2:start_step=2"]


@pytest.mark.parametrize(("ranks", "given"), [(1, []), (2, []), (2, IN_LOW_RANK)])
def test_a_resumed_run_ends_as_a_whole_one(ranks: int, given: list[str], tmp_path: Path) -> None:
    options = ("--ranks", ranks, "--steps", 6, *given)
    whole = train(*options)
    folder = tmp_path / "run"
    first = train(*options, "--checkpoint", folder, "--save-every", 2, "--keep", 2)
    assert names(folder) == ["step-00000004", "step-00000006"]
    (folder / "step-00000006" / "manifest.json").unlink()  # as if the last one was not committed
    again = train(*options, "--checkpoint", folder, "--save-every", 2, "--resume")
    assert "resumed after step 4" in again
    assert crc(whole) == crc(first) == crc(again)
    assert names(folder) == ["step-00000004", "step-00000006"]
    if given:
        changed = "replicas=powersgd4:start_step=2"
        text = train("--ranks", ranks, "--steps", 8, *given[:-1], changed,
                     "--checkpoint", folder, "--resume")  # fmt: skip
        assert re.search("sums of compression had kept begins at zero: 0.powersgd4.resid", text)


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
    said = train(*options, "--resume")
    assert f"resumed after step 2 in {tmp_path}\n" in said
    assert f"nothing was left to train: --steps 2, {tmp_path}/step-00000002\n" in said
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.ranks(1)
def test_another_model_is_refused_by_a_short_table(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"model": models.Llama(models.preset("2M"))})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "c", {"model": models.Llama(models.preset("10M"))})
    text = str(caught.value)
    assert re.search(r"parameter +saved +now", text), text
    assert re.search(r"layers.\*.\S+' \(4 of them\) +\(512, 192\) +\(864, 320\)", text), text
    assert len(text.splitlines()) < 30, text


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in found if "loss" in line]


def test_a_resume_takes_given_options_and_else_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Bits are those of an undisturbed run if nothing is given, although defaults differ."""
    run, metrics = tmp_path / "run", tmp_path / "m.jsonl"
    first = ("--steps", 4, "--lr", 0.002, "--betas", 0.7, 0.8, "--weight-decay", 0.3, "--clip", 0.5,
             "--schedule", "wsd", "--warmup", 0, "--decay", 1, "--accumulate", 2, "--seed", 5,
             "--deterministic", "--dtype", "fp32")  # fmt: skip
    whole = train(*first, "--checkpoint", run, "--save-every", 2)
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(run / "step-00000004")

    same = command("--checkpoint", run, "--resume")
    for option in ("--batch", "--seq", "--data"):  # nor are these given
        at = same.index(option)
        del same[at : at + 2]
    done = subprocess.run(same, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"resumed after step 2 in {run}\n" in done.stdout and crc(done.stdout) == crc(whole)

    run = tmp_path / "copy"
    said = train("--resume", "--checkpoint", run, "--lr", 5e-4, "--betas", 0.6, 0.75, "--steps", 8,
                 "--weight-decay", 0.2, "--no-deterministic", "--schedule", "cosine", "--metrics",
                 metrics, "--ranks", 2)  # fmt: skip
    changed = re.search(rf"resumed after step 4 in {run}, with (.*)\n", said)
    assert changed is not None, said
    assert changed[1].split(", ") == [
        "--steps 8 (was 4)", "--lr 0.0005 (was 0.002)", "--betas 0.6 0.75 (was 0.7 0.8)",
        "--weight-decay 0.2 (was 0.3)", "--schedule cosine (was wsd)",
        "no --decay (was 1)", "--no-deterministic", "2 ranks (was 1)",
    ]  # fmt: skip
    rates = [line["lr"] for line in lines_of(metrics)]
    factors = [0.05 + 0.95 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(4, 8)]
    assert rates == pytest.approx([5e-4 * factor for factor in factors])
    groups = manifest.read(run / "step-00000008")["optimizer"]["param_groups"]
    assert [group["betas"] for group in groups] == [[0.6, 0.75]] * 2
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert "lr = 0.0005\n" in (run / "run.toml").read_text()
    train("--resume", "--checkpoint", run, "--steps", 9, "--metrics", metrics)
    assert lines_of(metrics)[-1]["lr"] == pytest.approx(
        5e-4 * (0.05 + 0.95 * (1 + math.cos(math.pi * 8 / 9)) / 2)
    )


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (("--preset", "10M"), "--preset 2M"),
        (("--model", "gpt2"), "--model llama"),
        (("--optimizer", "lion"), "--optimizer adamw"),
        (("--seed", 1), "--seed 0"),
        (("--seq", 64), "--seq 32"),
    ],
)
def test_what_a_resume_cannot_change_is_refused_by_name(
    given: tuple[object, ...], kept: str, tmp_path: Path
) -> None:
    train("--steps", 0, "--checkpoint", tmp_path)
    words = command("--steps", 2, "--ranks", 2, "--checkpoint", tmp_path, "--resume", *given)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not done.stdout  # no rank has started
    said = f"{' '.join(map(str, given))}, and {tmp_path}/step-00000000 was trained with {kept}"
    assert said in done.stderr


def test_a_configuration_counts_as_given(tmp_path: Path) -> None:
    train("--steps", 1, "--checkpoint", tmp_path)
    (tmp_path / "own.toml").write_text("lr = 0.25\nsteps = 2\n")
    said = train("--config", tmp_path / "own.toml", "--checkpoint", tmp_path, "--resume")
    assert "with --steps 2 (was 1), --lr 0.25 (was 0.0015)\n" in said


def test_a_configuration_that_negates_is_told_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("no-deterministic = true\n")
    with pytest.raises(ValueError, match="'no-deterministic' .* write deterministic = false"):
        train_config.parse(["--config", str(tmp_path / "own.toml")])
    (tmp_path / "own.toml").write_text("deterministic = false\n")
    assert not train_config.parse(["--config", str(tmp_path / "own.toml")]).deterministic


@pytest.mark.ranks(1)
def test_a_checkpoint_of_another_program_is_not_resumed(tmp_path: Path) -> None:
    checkpoint.CheckpointManager(tmp_path).save(1, {"model": fsdpc.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="step-00000001 keeps no options, so fsdpc train did not"):
        train_config.parse(["--checkpoint", str(tmp_path), "--resume"])


def test_options_of_a_hostile_manifest() -> None:
    hostile = {"options": {"lr": "--export", "data": ["--export"], "steps": 3, "export": "/x"}}
    assert train_config.options_in({"extra": hostile}) == {"steps": 3}


def test_other_data_are_refused(tmp_path: Path) -> None:
    train("--steps", 0, "--checkpoint", tmp_path)
    words = command("--checkpoint", tmp_path, "--resume", "--data", ROOT / "csrc/nn")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and re.search(r"sequences, and --data has \d+: ", done.stderr)


def test_fp16_begins_with_a_scale_of_its_own(tmp_path: Path) -> None:
    train("--steps", 1, "--checkpoint", tmp_path)
    said = train("--steps", 2, "--checkpoint", tmp_path, "--resume", "--dtype", "fp16")
    assert "with --steps 2 (was 1), --dtype fp16 (was bf16)\n" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_renamed_copy_goes_on_from_its_own_step(ranks: int, tmp_path: Path) -> None:
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    options = ("--ranks", ranks, "--steps", 4)
    end = train(*options, "--checkpoint", whole, "--save-every", 2)
    shutil.copytree(whole / "step-00000002", copy / "step-00000009")
    said = train("--ranks", ranks, "--checkpoint", copy, "--resume")
    assert f"resumed after step 2 in {copy}" in said and crc(said) == crc(end)
    done = subprocess.run(
        command(*options, "--checkpoint", copy, "--resume", "--steps", 9, "--save-every", 1),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    free, said = copy / "step-00000002", done.stdout + done.stderr
    assert f"to do so now: mv {copy}/step-00000009 {free}\n" in said
    assert f"held step 2 and is {free} now" in said
    assert names(copy) == [f"step-{step:08}" for step in (2, 4, 5, 6, 7, 8, 9)]


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """The header says what the older one had, and the damaged one keeps no step taken."""
    folder = tmp_path / "run"
    train("--steps", 2, "--checkpoint", folder)
    train("--resume", "--steps", 4, "--lr", "0.001", "--checkpoint", folder)
    weights = max((folder / "step-00000004").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    output = train("--resume", "--checkpoint", folder)
    header = next(line for line in output.splitlines() if line.startswith("resumed after step 2"))
    assert "--lr 0.001 (was 0.0015)" in header and "--steps 4 (was 2)" in header
    assert "saved after step 4" in output
    assert checkpoint.inspect(folder / "step-00000004").step == 4


@pytest.mark.parametrize("dtypes", [("bf16", "fp16"), ("fp16", "bf16")])
def test_an_older_checkpoint_may_lack_the_scaler(dtypes: tuple[str, str], tmp_path: Path) -> None:
    """Which checkpoint is loaded decides, not the newest one, which is damaged."""
    for step, dtype in enumerate(dtypes, 1):
        train("--steps", step, "--dtype", dtype, "--checkpoint", tmp_path, "--resume")
    weights = max((tmp_path / "step-00000002").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = train("--resume", "--steps", 2, "--dtype", "fp16", "--checkpoint", tmp_path)
    assert "resumed after step 1" in said and "saved after step 2" in said
    scaler = manifest.read(tmp_path / "step-00000002")["scaler"]
    assert scaler["scale"] == 2.0**16


def test_a_default_that_is_given_is_no_change(tmp_path: Path) -> None:
    train("--steps", 20, "--batch", 1, "--schedule", "wsd", "--checkpoint", tmp_path)
    said = train("--steps", 20, "--batch", 1, "--schedule", "wsd", "--warmup", 1, "--decay", 2,
                 "--betas", 0.9, 0.95, "--lr", 0.0015, "--vocab", 256, "--clip", 1,
                 "--checkpoint", tmp_path, "--resume")  # fmt: skip
    assert f"resumed after step 20 in {tmp_path}\n" in said


def test_damaged_checkpoints_are_not_trained_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train("--steps", 1, "--checkpoint", folder)
    path = folder / "step-00000001" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    done = subprocess.run(
        command("--resume", "--steps", 1, "--checkpoint", folder),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0 and "none of the checkpoints in" in done.stderr
    assert names(folder) == ["step-00000001"]


def test_defaults_of_adapters_may_be_given_to_a_resume() -> None:
    options = train_config.parse(["--init-from", "base", "--lora", "4"])
    kept = train_config.kept_options(options)
    assert (kept["lora_alpha"], kept["lora_targets"]) == (8.0, "all-linear")


def test_switches_of_a_configuration_are_true_or_false(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('deterministic = "no"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="'deterministic' is true or false, not 'no'"):
        train_config.parse(["--config", str(path)])


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
    assert not done.stdout  # no rank has started


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


def test_quantised_runs_save_adapters_and_go_on_with_more_ranks(tmp_path: Path) -> None:
    train("--ranks", 1, "--steps", 1, "--export", tmp_path / "base")
    options = ("--init-from", tmp_path / "base", "--lora", 4, "--checkpoint", tmp_path / "run")
    quantised = (*options, "--quantize", "nf4", "--deterministic", "--batch", 1, "--steps", 4,
                 "--ema", 0.5)  # fmt: skip
    first = train(*quantised, "--ranks", 1, "--accumulate", 2, "--save-every", 2)
    step = tmp_path / "run" / "step-00000004"
    held = [t.name for t in checkpoint.inspect(step).tensors if t.kind == "model"]
    assert held and all(".lora_" in name for name in held)
    shutil.rmtree(step)
    more = ("--ranks", 2, "--accumulate", 1, "--resume", "--export", tmp_path / "adapter")
    again = train(*quantised, *more)
    assert "resumed after step 2" in again and crc(again) == crc(first)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    for wrong, message in (
        ((*options, "--quantize", "int8", "--resume"), "--quantize int8, and .* --quantize nf4"),
        (("--quantize", "nf4"), "--quantize needs --lora RANK"),
    ):
        done = subprocess.run(command(*wrong), capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
    generate = [sys.executable, "-m", "fsdpc", "generate", str(tmp_path / "run"), "x"]
    done = subprocess.run(generate, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "has the adapters of a run and no model" in done.stderr
