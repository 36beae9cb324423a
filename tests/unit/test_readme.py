"""The README's training script runs as it stands, for fewer steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_training_script(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    shorter = script.replace("range(400)", "range(3)").replace("% 20", "% 2")
    assert shorter != script
    path = tmp_path / "script.py"
    path.write_text(shorter)
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", "--timeout", "100", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^\[0\] step \d: loss ([\d.]+)", done.stdout, re.M)
    assert len(losses) == 2 and float(losses[1]) < float(losses[0]) < 6
