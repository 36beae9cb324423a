"""The programs of pages run as they stand, a page's in order, on one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "own-model.md": 4,
    "pictures.md": 5,
    "serving.md": 3,
    "toolkit.md": 12,
    "concepts/memory.md": 2,
    "concepts/schedule.md": 1,
    "concepts/strategies.md": 1,
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("page", PAGES)
def test_programs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "pictures.md":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.M)
    assert len(programs) == PAGES[page]
    names: dict[str, object] = {"__name__": "page"}
    for program in programs:
        exec(compile(program, page, "exec"), names)
