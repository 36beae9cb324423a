"""The files that the rules are about, and C sources without their comments and strings."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"


@cache
def files(*suffixes: str, under: str = "") -> list[Path]:
    """Return the tree's files, those not yet added included, with one of these suffixes."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", under]
    listed = subprocess.run(
        command[: None if under else -1], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    paths = sorted({ROOT / name for name in listed.split("\0") if name.endswith(suffixes or ("",))})
    return [path for path in paths if path.is_file()]


def label(path: Path) -> str:
    """Return the path as messages show it."""
    return path.relative_to(ROOT).as_posix()


_NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)


@cache
def code(path: Path) -> str:
    """Return a C file with comments and literals blanked out, every line where it was."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    return _NOT_CODE.sub(blank, path.read_text())
