"""``fsdpc train`` as people run it: the metrics, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fsdpc
from fsdpc.cli import train
from fsdpc.cli.train_tokens import make_source

ROOT = Path(__file__).parents[2]
SMALL = ("--batch", "2", "--seq", "32", "--data", str(ROOT / "docs"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}

EACH_STEP = {
    "step", "loss", "tokens_per_second", "grad_norm", "lr", "mfu", "peak_bytes", "comm_ms",
    "data_ms",
}  # fmt: skip
AT_THE_END = {
    "val_loss",
    "val_tokens",
    "val_bits_per_byte",
    "val_perplexity",
    "seconds",
    "params_crc32c",
}


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "fsdpc", "train", *SMALL, *map(str, options)]


def run(*options: object) -> str:
    done = subprocess.run(
        command(*options), capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_are_json_lines(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    output = run("--ranks", ranks, "--steps", 5, "--sample", 200, "--metrics", path)
    *steps, last = map(json.loads, path.read_text().splitlines())
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(set(line) == EACH_STEP for line in steps)
    assert all(math.isfinite(value) and value >= 0 for line in steps for value in line.values())
    assert steps[0]["lr"] == pytest.approx(1.5e-3) and steps[-1]["lr"] < 1.5e-3
    assert steps[0]["loss"] == pytest.approx(math.log(256), rel=0.1)
    assert (max(line["comm_ms"] for line in steps) > 0) == (ranks > 1)
    assert set(last) == AT_THE_END
    assert 0 < last["val_loss"] < 7 and re.fullmatch("[0-9a-f]{8}", last["params_crc32c"])
    held_out = make_source(train.parse(command()[4:])).datasets()[1]
    assert last["val_tokens"] == len(held_out) * 32
    assert f"validation loss {last['val_loss']:.4f} nats per byte" in output
    sample = output.partition("---- sample ----")[2]
    assert "def " in sample and len(sample) > 100  # bytes, more than a context of 32 holds


def test_the_demonstration_learns_and_shows_a_sample(tmp_path: Path) -> None:
    """Without options, but for a short end of it."""
    path = tmp_path / "run.jsonl"
    words = ("--ranks", "2", "--steps", "20", "--eval-bytes", "4096", "--metrics", str(path))
    done = subprocess.run(
        [sys.executable, "-m", "fsdpc", "train", *words],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *steps, last = map(json.loads, path.read_text().splitlines())
    assert steps[0]["loss"] > 5 and last["val_loss"] < 4
    assert len(done.stdout.partition("---- sample ----")[2]) > 300


def test_the_recorded_demonstration_is_the_default_one() -> None:
    """The page has the time and the loss of these options."""
    o = train.parse([])
    train.check(o)
    text = (ROOT / "benchmarks" / "README.md").read_text()
    row = " ".join(text.partition("## The main job (`make train`)")[2][:2000].split())
    assert row.startswith(
        f"{o.preset} LLaMA, {o.dtype}, 2 ranks on 2 cores, {o.steps} steps of "
        f"{2 * o.batch * o.accumulate * o.seq:,} bytes, learning rate {o.lr:g}, "
    )


def test_a_sample_has_no_bytes_that_a_terminal_obeys() -> None:
    """A model that knows nothing writes any byte."""
    sample = run("--steps", 0, "--eval-bytes", 0, "--sample", 1000).partition("sample ----\n")[2]
    assert len(sample) > 500 and "\ufffd" in sample
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", sample)


@pytest.mark.parametrize(("asked", "seen"), [(0, None), (100, 96)])
def test_validation_takes_as_many_bytes_as_it_is_told(
    asked: int, seen: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    output = run("--steps", 1, "--sample", 0, "--eval-bytes", asked, "--metrics", path)
    assert json.loads(path.read_text().splitlines()[-1]).get("val_tokens") == seen
    assert ("validation loss" in output) == bool(seen)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x93NUMPY\x01\x00", "a NumPy array"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x80\x04\x95", "a pickle"),
        (b"\x40" + bytes(7) + b'{"w":{', "a safetensors file"),
        (b"text and\0no text", "binary"),
    ],
)
def test_data_that_are_no_text_are_refused(head: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words " * 1000)
    (tmp_path / "x").write_bytes(head + b"x" * 5000)
    done = subprocess.run(
        [sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--data", tmp_path],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{tmp_path}/x is {kind}" in done.stderr and "TokenDataset" in done.stderr


def test_a_file_of_metrics_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        run("--steps", 1, "--sample", 0, "--eval-bytes", 64, "--metrics", path)
    assert len(path.read_text().splitlines()) == 2


def test_fp32_gpt2_that_accumulates_and_recomputes(tmp_path: Path) -> None:
    """Options that change the work, not the result: the checksum of the parameters tells."""
    common = ("--model", "gpt2", "--dtype", "fp32", "--steps", 2, "--accumulate", 2)
    quick = ("--sample", 0, "--eval-bytes", 0)
    found = []
    for i, more in enumerate(((), ("--checkpoint-activations",), ("--checkpoint-activations", 2))):
        path = tmp_path / str(i)
        run("--ranks", 2, *common, *quick, *more, "--metrics", path)
        found.append(json.loads(path.read_text().splitlines()[-1])["params_crc32c"])
    assert len(set(found)) == 1


@pytest.mark.parametrize("ranks", [(), ("--ranks", 2)], ids=["one", "two"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--seed", -1), "--seed must be at least 0, got -1"),
        (("--eval-bytes", -1), "--eval-bytes must be at least 0, got -1"),
        (("--seed", 2**64), "--seed must be below 2^63"),
        (("--lr", "inf"), "--lr must be finite, got inf"),
        (("--batch", 1_000_000), "sequences of 32 to train on, "),
        (("--preset", "70B"), "--preset 70B on "),
        (("--weight-decay", -0.1), "--weight-decay must be at least 0, got -0.1"),
        (("--weight-decay", "nan"), "--weight-decay must be at least 0, got nan"),
        (("--checkpoint-activations", 0), "a ratio up to 1, or memory such as 800MiB, got '0'"),
        (("--checkpoint-activations", 1.5), "a ratio up to 1, or memory such as 800MiB, got '1.5'"),
        (("--strategy", "hybrid_shard"), "--strategy HYBRID_SHARD needs --mesh RxS"),
        (("--strategy", "hybrid_shard", "--mesh", "2x2"), "--mesh 2x2 is of 4 ranks, not "),
        (("--strategy", "no_shard", "--mesh", "3x1"), "--mesh 3x1 is of 3 ranks, not "),
        (("--strategy", "shard_grad_op", "--reshard-after-forward", "true"), "SHARD_GRAD_OP keeps"),
        (("--reshard-after-forward", 7), "reshard_after_forward=7: True, False, None, or a number"),
    ],
)
def test_what_cannot_be_is_said_once(
    arguments: tuple[object, ...], text: str, ranks: tuple[object, ...]
) -> None:
    done = subprocess.run(
        command(*ranks, *arguments), capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and text in done.stderr


def test_training_that_diverges_ends_in_a_sentence() -> None:
    done = subprocess.run(
        command("--lr", 1e30, "--steps", 50, "--dtype", "fp32"),
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"training diverged: .* is (nan|inf).*take a lower --lr", done.stderr)


def children(pid: int) -> list[int]:
    """Processes whose parent it is."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ctrl_c_while_ranks_start_is_answered_in_a_sentence() -> None:
    """Whatever they are importing just then; twice, as the moment is chance's."""
    for _ in range(2):
        process = subprocess.Popen(
            command("--ranks", 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        while len(children(process.pid)) < 2:
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 128 + signal.SIGINT
        # A rank whose interpreter has not begun yet dies of it without a word.
        words = {f"[{rank}] fsdpc train: interrupted" for rank in range(2)}
        assert out and set(out.splitlines()) <= words | {"fsdpc: ended by SIGINT"}, out
