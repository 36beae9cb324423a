"""The table of environment variables, its documentation and its users agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .tree import CSRC, ROOT, code, files, label

HEADER = (CSRC / "base" / "env.h").read_text()
PAGE = (ROOT / "docs" / "environment.md").read_text()

# The table's reader, and that of OMP_NUM_THREADS.
READERS = {"csrc/base/env.c", "csrc/bind/state.c",
           "csrc/cuda/nccl_env.c"}  # NCCL's own variables

ENTRY = re.compile(
    r'X\(\s*\w+,\s*(\w+),\s*"(FSDPC_\w+)",\s*([^,]+),\s*[^,]+,\s*[^,]+,[\s\\]*"([^"]*)"\)'
)


def table() -> dict[str, tuple[str, str, str]]:
    """Variable -> type, default and text of FSDPC_ENV_TABLE."""
    entries = ENTRY.findall(HEADER)
    found = {name: (kind, default.strip('" '), text) for kind, name, default, text in entries}
    assert found, "FSDPC_ENV_TABLE was not found in csrc/base/env.h"
    return found


def foreign() -> set[str]:
    """Names in FSDPC_ENV_FOREIGN."""
    return set(re.findall(r'"(FSDPC_\w+)"', HEADER.split("#define FSDPC_ENV_FOREIGN")[1]))


def documented() -> dict[str, list[str]]:
    """Variable -> the other cells of its row."""
    rows = re.findall(r"^\| `(FSDPC_\w+)` \|(.*)\|$", PAGE, re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_every_variable_is_documented_as_it_is() -> None:
    rows = documented()
    for name, (kind, default, text) in table().items():
        assert name in rows, f"{name} is missing in docs/environment.md"
        assert rows[name][0] == kind and rows[name][1] == default and rows[name][-1] == text, name


def test_nothing_else_is_documented() -> None:
    assert set(documented()) == set(table()) | foreign()


@pytest.mark.parametrize("path", files(".c", ".h", under="csrc"), ids=label)
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    assert not re.search(r'\bgetenv\s*\(\s*"FSDPC_', path.read_text()), f"{label(path)}: use env.h"
    if re.search(r"\bgetenv\s*\(", code(path)):
        assert label(path) in READERS, f"{label(path)} reads the environment"


@pytest.mark.parametrize("path", files(".py"), ids=label)
def test_python_uses_known_variables(path: Path) -> None:
    known = set(table()) | foreign()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if re.fullmatch(r"FSDPC_[A-Z_]*[A-Z]", name) and "tests" not in path.parts:
                assert name in known, f"{label(path)}:{node.lineno}: {name} is in no table"
