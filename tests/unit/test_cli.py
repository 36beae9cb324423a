"""The ``fsdpc`` command: its version, a wrong environment, streams that are closed."""

from __future__ import annotations

import os
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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def fsdpc_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fsdpc", *arguments]


def test_the_version() -> None:
    assert run(fsdpc_command("--version")).stdout == f"fsdpc {fsdpc.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("train", "--rank", "2"), "unrecognized arguments: --rank"),
        (("run", "--rank", "2", __file__), "required: --ranks"),
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
