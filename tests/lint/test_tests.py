"""A test is found from its source: by name, or in tests/sources.txt."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePath

import pytest

from .tree import ROOT, files, label

SOURCES = [
    path
    for folder in ("csrc/engine", "csrc/comm", "csrc/bind", "csrc/cuda", "python/fsdpc")
    for path in files(".c", ".py", under=folder)
    if not path.name.startswith("__")
]


@cache
def names() -> set[str]:
    """What tests are called, without test_."""
    tests = files(".c", ".py", under="tests")
    return {path.stem[5:] for path in tests if path.name.startswith("test_")}


@cache
def table() -> list[tuple[list[str], list[str]]]:
    """Return (patterns of sources, patterns of tests), a pair a row."""
    text = (ROOT / "tests" / "sources.txt").read_text()
    rows = re.findall(r"^([^#\n].*): (.*)$", text, re.M)
    return [(left.split(), right.split()) for left, right in rows]


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_each_source_has_a_test(path: Path) -> None:
    own = path.stem.lstrip("_")
    listed = any(PurePath(label(path)).match(each) for left, _ in table() for each in left)
    assert own in names() or listed, (
        f"{label(path)} has no test of its name: add one, or a row in tests/sources.txt"
    )


def test_the_table_names_what_exists() -> None:
    for left, right in table():
        for pattern in left + right:
            assert list(ROOT.glob(pattern)), f"tests/sources.txt: {pattern} matches no file"
