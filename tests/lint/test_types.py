"""Types of the public API, as a type checker sees them from outside, and of the examples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .tree import ROOT

# Of all that modules without an underscore export. What is missing derives from classes of torch,
# Lightning and Accelerate, which need not be installed.
COMPLETE = 0.985


def check(folder: Path, *options: str) -> dict[str, Any]:
    """Return what basedpyright, run in a folder, finds in the fsdpc of this tree."""
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    checker = shutil.which("basedpyright", path=binaries)
    if checker is None:
        pytest.skip("there is no basedpyright")
    # It asks the first python on PATH where packages are, and not the option --pythonpath.
    env = {**os.environ, "PATH": binaries, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([checker, *options, "--outputjson"], env=env, cwd=folder,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    return json.loads(done.stdout)


def test_types_are_complete(tmp_path: Path) -> None:
    found = check(tmp_path, "--verifytypes", "fsdpc", "--ignoreexternal")["typeCompleteness"]
    assert Path(found["packageRootDirectory"]) == ROOT / "python" / "fsdpc"
    unknown = [each["name"] for each in found["symbols"] if each["isExported"]
               and not each["isTypeKnown"] and not each["isTypeAmbiguous"]
               and not each["name"].startswith(("fsdpc.torch", "fsdpc.integrations"))]
    assert not unknown, f"nothing says the types of {unknown}"
    score = found["completenessScore"]
    assert score >= COMPLETE, f"{score:.4f} of the public types are known, {COMPLETE} were"


def test_examples_are_strict() -> None:
    found = check(ROOT)  # by [tool.basedpyright] of pyproject.toml
    assert found["summary"]["filesAnalyzed"] >= 18
    said = [f"{each['file']}:{each['range']['start']['line'] + 1}: {each['message']}"
            for each in found["generalDiagnostics"]]  # fmt: skip
    assert not said, "\n".join(said)
