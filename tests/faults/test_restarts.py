"""``fsdpc run --max-restarts``: what starts again after a failure, and what does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdpc.launching.launcher import run

# Rank 1 ends badly at the first starts.
FAILS = """
import os, sys
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("start", start, *sys.argv[1:])
if os.environ["RANK"] == "1" and start < {fails}:
    sys.exit({code})
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def start(*arguments: str) -> tuple[int, str, str]:
    words = [sys.executable, "-m", "fsdpc", "run", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_run_starts_again_after_failures(tmp_path: Path) -> None:
    path = script(tmp_path, FAILS.format(fails=2, code=7))
    code, out, err = start("--ranks", "2", "--max-restarts", "3", path)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] start {s}" for r in (0, 1) for s in range(3)]
    assert "all ranks start again (2 of 3)" in err and "(3 of 3)" not in err


@pytest.mark.parametrize(("code", "starts"), [(7, 2), (2, 1)], ids=["fails", "was called wrongly"])
def test_run_gives_up_with_the_ranks_code(code: int, starts: int, tmp_path: Path) -> None:
    path = script(tmp_path, FAILS.format(fails=100, code=code))
    found, out, _ = start("--ranks", "2", "--max-restarts", "1", path)
    assert found == code
    assert out.count("[1] start") == starts


def test_run_adds_arguments_where_it_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, FAILS.format(fails=1, code=7))
    assert run([path, "data"], 2, max_restarts=1, again=["--resume"]) == 0
    out = capsys.readouterr().out
    assert "[1] start 0 data\n" in out and "[1] start 1 data --resume\n" in out


def test_run_is_over_at_its_timeout(tmp_path: Path) -> None:
    path = script(tmp_path, "import time; time.sleep(100)")
    arguments = ("--ranks", "1", "--timeout", "0.5", "--max-restarts", "5")
    code, _, err = start(*arguments, path)
    assert code == 124 and "start again" not in err
