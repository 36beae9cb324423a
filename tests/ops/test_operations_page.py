"""docs/operations.md lists what there is, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import fsdpc

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def named(heading: str) -> set[str]:
    """Names in backquotes under a heading."""
    part = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`(?:fsdpc\.)?(\w+)`", part))


def test_functions() -> None:
    assert named("Functions") == set(fsdpc.functional.__all__)


def test_modules() -> None:
    found = named("Modules")
    assert set(fsdpc.nn.__all__) <= found


def test_tensors_from_a_shape() -> None:
    from fsdpc.tensors import creation

    assert named("Tensors from data, or from a shape") == set(creation.__all__)
    assert all(getattr(fsdpc, name) for name in creation.__all__)
