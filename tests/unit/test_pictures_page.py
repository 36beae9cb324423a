"""The programs of docs/pictures.md run as they stand, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "pictures.md"


@pytest.mark.ranks(1)
def test_programs_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(programs) >= 2
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), names)
