"""The line at the bottom of a terminal, and what is printed above it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from terminals import in_terminal, visible

import fsdpc
from fsdpc.launching import screen

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}


class Terminal(io.StringIO):
    """A terminal that remembers what was written."""

    def isatty(self) -> bool:
        return True


@contextmanager
def a_terminal() -> Iterator[Terminal]:
    """Give one that stdout and stderr are; fixtures cannot, as pytest puts its own there."""
    with redirect_stdout(Terminal()) as terminal, redirect_stderr(terminal):
        yield terminal


def test_text_goes_above_the_line() -> None:
    with a_terminal() as terminal:
        line = screen.Screen(terminal)
        with screen.above(line):
            for step in range(3):
                line.show(f"step {step} of 3" + "." * (9 - step))  # shorter than the one before
                print("saved", step)
            print("in ", end="")
            line.show("drawn when the line above has ended")
            assert visible(terminal.getvalue())[-1] == "in"
            print("parts", file=sys.stderr)
            assert visible(terminal.getvalue())[-1] == "drawn when the line above has ended"
            line.show("step 3 of 3")
        assert sys.stdout is terminal
        assert visible(terminal.getvalue()) == [
            "saved 0", "saved 1", "saved 2", "in parts", "step 3 of 3", ""
        ]  # fmt: skip


def test_a_cleared_line_leaves_nothing() -> None:
    with a_terminal() as terminal:
        line = screen.Screen(terminal)
        line.show("validation")
        line.show("")
        line.close()
        terminal.write("next\n")
        assert visible(terminal.getvalue()) == ["next", ""]


def test_long_lines_are_cut_to_the_terminal() -> None:
    with a_terminal() as terminal:
        line = screen.Screen(terminal)
        line.show("x" * 200)
        line.close()
        assert visible(terminal.getvalue()) == ["x" * 79, ""]


def test_a_line_of_a_rank_stays_until_that_rank_writes() -> None:
    with a_terminal() as terminal:
        with screen.rank_lines() as write:
            write("[0] 1 of 3\r")
            write("[1] warning\n")
            write("[0] \r[0] 2 of 3\r")  # as tqdm begins a line
            write("[1] once more\n[1] and again\n")
            assert visible(terminal.getvalue())[-1] == "[0] 2 of 3"
            write("[0] 3 of 3\n")
            write("[1] goodbye\n")
        assert visible(terminal.getvalue()) == [
            "[1] warning", "[1] once more", "[1] and again", "[0] 3 of 3", "[1] goodbye", ""
        ]  # fmt: skip


BAR = """
import os, sys
if os.environ["RANK"] == "0":
    from tqdm import tqdm
    for i in tqdm(range(40), mininterval=0, ncols=60):
        if i % 10 == 0: tqdm.write(f"at {i}", file=sys.stderr)
else:
    for i in range(40): print("line", i)
"""


def test_bars_of_scripts_are_not_torn_by_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    script = tmp_path / "script.py"
    script.write_text(BAR)
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", str(script)]
    code, written = in_terminal(command, ENVIRONMENT, columns=50)
    lines = visible(written)
    assert code == 0
    assert [x for x in lines if x.startswith("[1]")] == [f"[1] line {i}" for i in range(40)]
    assert [each for each in lines if " at " in each] == [f"[0] at {i}" for i in (0, 10, 20, 30)]
    bars = [each for each in lines if "%|" in each]
    assert len(bars) == 1 and bars[0].startswith("[0] 100%|")
    assert len(lines) == 40 + 4 + 1 + 1, lines
    drawn = [line for line in written.replace("\n", "\r").split("\r") if "%|" in line]
    assert all(len(line) < 50 for line in drawn[:-1])  # none, if the last came at once
