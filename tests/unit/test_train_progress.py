"""The bar of ``fsdpc train`` in a terminal, and the lines where there is none."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from terminals import in_terminal, visible, widest

import fsdpc
from fsdpc.data import default_corpus

ROOT = Path(__file__).parents[2]
SMALL = ("--batch", "2", "--seq", "32", "--data", str(ROOT / "docs"), "--sample", "0")


def train(*options: object, hidden: Path | None = None, columns: int = 80) -> str:
    """What the command writes in a terminal; without tqdm where a folder hides it."""
    paths = [str(hidden)] if hidden else []
    paths.append(str(Path(fsdpc.__file__).parents[1]))
    command = [sys.executable, "-m", "fsdpc", "train", *SMALL, *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    code, written = in_terminal(command, environment, columns)
    assert code == 0, written
    return written


@pytest.fixture
def no_tqdm(tmp_path: Path) -> Path:
    """A folder that hides tqdm."""
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "tqdm.py").write_text("raise ImportError('not here')\n")
    return tmp_path / "hiding"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bar_stays_below_what_is_printed(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    written = train("--ranks", ranks, "--steps", 30, "--eval-every", 10, "--eval-bytes", 4000,
                    "--checkpoint", tmp_path, columns=90)  # fmt: skip
    front = r"\[0\] " if ranks > 1 else ""
    facts = r"loss [\d.]+, [\d,]+ tokens/s, MFU \d+%"
    drawn = [line for line in re.split(r"[\r\n]+", written) if "30 [" in line]
    assert len(drawn) >= 2 and drawn[0].endswith("- tokens/s, MFU -]")  # no measure yet
    assert re.fullmatch(rf"{front}100%\|█+\| 30/30 \[\d\d:\d\d, ETA 00:00, {facts}\]", drawn[-1])
    assert widest("\n".join(drawn)) < 90
    lines = visible(written)
    assert [line for line in lines if "%|" in line] == [drawn[-1]]
    assert sum(f"step {step}: validation loss " in line for line in lines for step in (10, 20)) == 2
    of_all = [line for line in lines if "saved after step 30: " in line]
    assert len(of_all) == 1 and re.match(rf"{front}saved after step 30: /", of_all[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_line_is_rewritten_without_tqdm(ranks: int, no_tqdm: Path) -> None:
    output = train("--ranks", ranks, "--steps", 30, hidden=no_tqdm)
    shown = [line for line in re.split(r"[\r\n]+", output) if re.search(r"step \d+/30 ", line)]
    assert len(shown) >= 2 and "step 30/30" in shown[-1]
    assert "  - tokens/s" in shown[0]  # the first steps are no measure
    assert re.search(r"loss [\d.]+ +norm [\d.e+]+ +[\d,]+ tokens/s +ETA 0:00 +MFU \d+%", shown[-1])
    assert widest("\n".join(shown)) <= 80
    assert sum("/30 " in line for line in visible(output)) == 1  # rewritten, not scrolled
    assert re.search(r"llama 2M: 1,869,504 parameters, bf16, \d ranks?, FULL_SHARD", output)
    assert re.search(r"[\d,]+ bytes of text to train on, [\d,]+ a step, [\d,]+ held out", output)


def test_lines_instead_of_a_bar() -> None:
    output = train("--ranks", 2, "--steps", 5, "--no-progress")
    assert "%|" not in output and "\r" not in output.replace("\r\n", "\n")
    assert re.search(r"^\[0\] step 5/5  loss ", output, re.M)


@pytest.mark.parametrize("ranks", [1, 2])
def test_lines_fit_a_terminal_of_80_columns(ranks: int) -> None:
    """The library's text makes the numbers as long as they are by default."""
    library = ("--data", *default_corpus(), "--eval-bytes", 2000, "--eval-every", 2)
    written = train("--ranks", ranks, "--steps", 4, *library)
    lines = visible(written)
    for each in ("bytes of text to train on", "ms a step on average", "step 2: validation loss",
                 "bits, perplexity", "s in all"):  # fmt: skip
        assert any(each in line for line in lines), written
    assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_an_error_has_a_line_of_its_own() -> None:
    pytest.importorskip("tqdm")
    command = [sys.executable, "-m", "fsdpc", "train", *SMALL, "--steps", "50", "--lr", "1e30"]
    code, written = in_terminal(command, {**os.environ, "PYTHONPATH": str(ROOT / "python")})
    assert code == 2
    assert visible(written)[-2].startswith("fsdpc train: training diverged: ")
