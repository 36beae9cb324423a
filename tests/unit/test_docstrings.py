"""The examples of docstrings give what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.needs import need_torch

import fsdpc

PACKAGE = Path(fsdpc.__file__).parent


def test_examples_of_docstrings() -> None:
    """In a process of their own, as one of them forks ranks."""
    need_torch()  # modules of the torch door are collected too
    others = "--ignore-glob=*/integrations/*"  # each imports its framework, for seconds
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules"]
    done = subprocess.run(
        [*command, others, str(PACKAGE)], capture_output=True, text=True, timeout=120,
        cwd=PACKAGE.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    with_examples = [p for p in PACKAGE.rglob("*.py") if re.search(r"^ +>>> ", p.read_text(), re.M)]
    passed, *_ = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= len(with_examples) >= 8
