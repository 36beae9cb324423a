"""The rooms of python/fsdpc: imports go down, in no circle, and docs/design.md draws them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .tree import ROOT

tomllib = pytest.importorskip("tomllib")  # of Python 3.11

PACKAGE = ROOT / "python" / "fsdpc"


def layers() -> list[list[str]]:
    """Return the rooms, layer by layer from above, as the contract in pyproject.toml has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    found = contracts["contracts"][0]["layers"]
    return [re.split(r" [|:] ", layer) for layer in found]


def purpose(room: str) -> str:
    """Return the first paragraph of a room's docstring."""
    path = PACKAGE / room / "__init__.py"
    path = path if path.exists() else PACKAGE / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ").rstrip(".")


def drawn() -> str:
    """Return the table of docs/design.md."""
    rows = [f"| {'<br>'.join(f'`{r}`' for r in layer)} | {'<br>'.join(map(purpose, layer))} |"
            for layer in layers()]  # fmt: skip
    return "\n".join(["| rooms | what they are for |", "|---|---|", *rows])


def test_imports_keep_to_the_contract() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_at_most_twenty_rooms() -> None:
    found = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    named = {room for layer in layers() for room in layer}
    assert found - {"__init__", "__main__"} == named
    assert len(named - {"_version"}) + 1 <= 20  # with _core


def test_the_design_draws_the_contract() -> None:
    table = drawn()
    assert table in (ROOT / "docs" / "design.md").read_text(), f"docs/design.md needs\n{table}"
