"""Scripts of pages, to be run as they are."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def script_of(page: str, mark: str) -> str:
    """Return the script of a page that calls something in place of ``mark``."""
    scripts = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (script,) = [text for text in scripts if f"in place of {mark}" in text]
    return script
