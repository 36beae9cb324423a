"""Scripts of pages, run as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def run_script(page: str, mark: str, folder: Path, launcher: list[str]) -> str:
    """Run the script of a page that has a mark, in a folder, on two ranks; return its output."""
    scripts = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (script,) = [text for text in scripts if f"in place of {mark}" in text]
    (folder / "script.py").write_text(script)
    number = "--num_processes=2" if "accelerate" in launcher[0] else "--nproc_per_node=2"
    command = [sys.executable, "-m", *launcher, number, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
