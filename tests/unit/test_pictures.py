"""The pictures of docs/ are what the engine does today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lint.tree import ROOT

PICTURES = ROOT / "docs" / "pictures"


def test_pictures_are_drawn_from_the_engine(tmp_path: Path) -> None:
    """Again, in a process of their own, as it forks ranks."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "pictures.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in PICTURES.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir()) and len(names) == 3
    for name in names:
        drawn = (tmp_path / name).read_text()
        assert drawn == (PICTURES / name).read_text(), f"run tools/pictures.py: {name} is old"
