"""The examples of docstrings give what they say."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.needs import need_torch

import fsdpc
from fsdpc import _core

PACKAGE = Path(fsdpc.__file__).parent
#: Each example begins without a world; those that fork ranks come before engine threads are there.
FRESH = """
import fsdpc, pytest

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "find_batch_size" not in item.name and "launch" not in item.name)

@pytest.fixture(autouse=True)
def fresh():
    yield
    fsdpc.shutdown()
"""


def test_examples_of_docstrings(tmp_path: Path) -> None:
    """In a process of their own, as one of them forks ranks."""
    need_torch()  # modules of the torch door are collected too
    others = "--ignore-glob=*/integrations/*"  # each imports its framework, for seconds
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules"]
    (tmp_path / "fresh_examples.py").write_text(FRESH)
    env = os.environ | {"FSDPC_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [*command, "-p", "fresh_examples", others, str(PACKAGE)], capture_output=True, text=True,
        timeout=900, cwd=PACKAGE.parent, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    with_examples = [p for p in PACKAGE.rglob("*.py") if re.search(r"^ +>>> ", p.read_text(), re.M)]
    passed, *_ = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= len(with_examples) >= 8


def test_examples_of_the_extension() -> None:
    """Its docstrings are the stub's."""
    named = {name: getattr(_core, name) for name in dir(_core) if not name.startswith("__")}
    named |= {f"Tensor.{name}": value for name, value in vars(_core.Tensor).items()
              if inspect.ismethoddescriptor(value)}  # fmt: skip
    runner, said = doctest.DocTestRunner(), []
    for name, value in named.items():
        found = doctest.DocTestParser().get_doctest(
            inspect.getdoc(value) or "", {"fsdpc": fsdpc}, name, None, 0
        )
        runner.run(found, out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 150
