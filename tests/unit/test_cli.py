"""The ``fsdpc`` command: its version, a wrong environment, streams that are closed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdpc

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}
TRAIN = ("train", "--steps", "1", "--sample", "0", "--eval-bytes", "0", "--seq", "32",
         "--batch", "1", "--data", __file__)  # fmt: skip


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def fsdpc_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fsdpc", *arguments]


def test_the_version() -> None:
    assert run(fsdpc_command("--version")).stdout == f"fsdpc {fsdpc.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("train", "--rank", "2"), "unrecognized arguments: --rank"),
        (("run", "--rank", "2", __file__), "--ranks --ranks-per-host --elastic is required"),
        (("ckpt", "convert", "--lay", "dcp", "a", "b"), "unrecognized arguments: --lay"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_options_have_one_spelling(arguments: tuple[str, ...], wrong: str) -> None:
    done = run(fsdpc_command(*arguments))
    assert done.returncode == 2 and wrong in done.stderr, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("info",), ("train", "--ranks", "2"), ("run", "--ranks", "2", __file__), ("ckpt", "ls", ".")],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize(("name", "value"), [("FSDPC_TIMEOUT", "3"), ("FSDPC_ISA", "mmx")])
def test_a_wrong_variable_is_one_sentence(arguments: list[str], name: str, value: str) -> None:
    done = run(fsdpc_command(*arguments), **{name: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and name in done.stderr


LAUNCH = """
import os, sys
from fsdpc import launch
def rank():
    print("said to nobody")
    return int(os.environ["RANK"])
assert (sys.stdout is None) != (sys.stderr is None)
os._exit(0 if launch(rank, 2) == [0, 1] else 1)
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_closed_streams_are_no_error(ranks: str, closed: str) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    done = run([*shell, *fsdpc_command(*TRAIN, "--ranks", ranks)])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_function_is_launched_beside_closed_streams(closed: str) -> None:
    done = run(["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", LAUNCH])
    assert done.returncode == 0, done.stderr


ON_2048 = ("--hosts", "1", "--ranks-per-host", "2048")


def estimated(*options: str) -> dict[str, float]:
    """What a rank of the 70B in bf16 holds by category, in bytes."""
    done = run(fsdpc_command("estimate", "--preset", "70B", "--batch", "1", *options))
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) +([\d.,]+) ([KMGT]iB|B)$", done.stdout, re.M)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    return {name: float(n.replace(",", "")) * 2 ** (10 * units.index(unit))
            for name, n, unit in rows}  # fmt: skip


def test_estimate_shows_what_a_gpu_would_hold() -> None:
    here = estimated(*ON_2048)
    there = estimated(*ON_2048, "--device", "cuda")
    params, rest = 69e9, 0.5e9  # of which embedding and head, the root's
    block = (params - rest) / 80
    unsharded = 2 * (params / 2048 + rest + 2 * block)  # own slices, the root, two blocks at a time
    assert there["unsharded"] == pytest.approx(unsharded, rel=0.1)
    assert here["unsharded"] == pytest.approx(2 * params, rel=0.1)  # one copy a host
    assert there["master"] == pytest.approx(4 * params / 2048, rel=0.1)
    assert there["state"] == pytest.approx(8 * params / 2048, rel=0.1)
    assert {key for key in here if here[key] != there[key]} == {"unsharded", "total"}
    assert there["total"] == pytest.approx(sum(there.values()) - there["total"], rel=1e-3)
    hybrid = ("--mesh", "8x256", "--strategy", "hybrid_shard_zero2", "--device", "cuda")
    kept = estimated(*ON_2048, *hybrid)
    assert kept["unsharded"] == pytest.approx(2 * params * (1 + 1 / 256), rel=0.1)
    stays = (*ON_2048, "--device", "cuda", "--reshard-after-forward", "false")
    assert estimated(*stays)["unsharded"] == pytest.approx(2 * params, rel=0.1)
    less = estimated(*ON_2048, "--device", "cuda", "--checkpoint-activations")
    assert less["activation"] < 0.2 * there["activation"]
    half = f"{there['activation'] / 2**31:.1f}GiB"
    less = estimated(*ON_2048, "--checkpoint-activations", half)
    assert 0.3 * there["activation"] < less["activation"] < 0.51 * there["activation"]


@pytest.mark.parametrize("options, said", [
    (["--device", "tpu"], "choose from 'cpu', 'cuda'"),
    (["--ranks-per-host", "0"], "--ranks-per-host must be at least 1"),
    (["--batch", "0"], "--batch must be at least 1"),
    (["--mesh", "2x2", "--ranks-per-host", "3"], "is of 4 ranks, not 3"),
])  # fmt: skip
def test_estimate_refuses_what_cannot_be(options: list[str], said: str) -> None:
    done = run(fsdpc_command("estimate", *options))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is Python 3.11's")
def test_folders_beyond_ascii_under_an_ascii_locale(tmp_path: Path) -> None:
    """What is written there is read under UTF-8 as well, and the other way round."""
    text, folder = tmp_path / "données" / "texte", tmp_path / "données" / "exécution"
    text.mkdir(parents=True)
    (text / "é.txt").write_text("café €\n" * 2000, encoding="utf-8")

    def command(*words: object, **variables: str) -> str:
        environment = ENVIRONMENT | ASCII | variables
        done = subprocess.run(fsdpc_command(*map(str, words)), env=environment,
                              capture_output=True, timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    small = ("--batch", 1, "--seq", 32, "--eval-bytes", 64, "--sample", 20)
    log = ("--log", f"csv:{folder}.csv", "--metrics", f"{folder}.jsonl")
    said = command("train", *small, "--data", text, "--steps", 1, "--checkpoint", folder, *log)
    assert f"saved after step 1: {folder}/step-00000001" in said  # its bytes
    assert f'data = ["{text}"]\n' in (folder / "run.toml").read_text(encoding="utf-8")
    config = ("--config", folder / "run.toml")
    command("train", *config, "--resume", "--steps", 2, "--ranks", 2, PYTHONIOENCODING="ascii")
    utf8 = command("train", "--checkpoint", folder, "--resume", "--steps", 3, PYTHONUTF8="1")
    assert f"resumed after step 2 in {folder}, with --steps 3 (was 2)" in utf8
    assert "valid" in command("ckpt", "ls", folder)
    command("ckpt", "verify", folder)
    command("generate", folder, "café", "--max-new-tokens", 5)
    script = tmp_path / "données" / "é.py"
    script.write_text("print('caf\\u00e9')\n", encoding="utf-8")
    assert "[1] caf?" in command("run", "--ranks", 2, script)
    assert "[1] café" in command("run", "--ranks", 2, script, PYTHONUTF8="1")


def test_the_command_alone_prints_help() -> None:
    done = run(fsdpc_command())
    assert done.returncode == 0 and done.stdout.startswith("usage: fsdpc ") and not done.stderr


@pytest.mark.parametrize("words, said", [
    (["trian"], "did you mean train?"),
    (["train", "--acumulate", "2"], "did you mean --accumulate?"),
    (["plan", "--memory", "1", "--rank-per-host", "2"], "did you mean --ranks-per-host?"),
    (["ckpt", "verfy", "x"], "did you mean verify?"),
    (["xyzzy"], "invalid choice: 'xyzzy'"),
])  # fmt: skip
def test_a_mistyped_word_gets_a_suggestion(words: list[str], said: str) -> None:
    done = run(fsdpc_command(*words))
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_help_fits_into_80_columns() -> None:
    commands = ["", "run", "train", "data", "data tokenize", "generate", "estimate", "simulate",
                "plan", "plot", "ckpt", "ckpt convert", "flight", "info"]  # fmt: skip
    for command in commands:
        narrow = ENVIRONMENT | {"COLUMNS": "80"}
        done = subprocess.run(fsdpc_command(*command.split(), "--help"), capture_output=True,
                              text=True, env=narrow, timeout=60)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not [line for line in done.stdout.splitlines() if len(line) > 80], command
