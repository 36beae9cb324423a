"""Types of the public API, as a type checker sees them from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .tree import ROOT

# Of all that modules without an underscore export. What is missing derives from a class of
# Accelerate, which need not be installed.
COMPLETE = 0.99


def test_types_are_complete(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    checker = shutil.which("basedpyright", path=f"{folder}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("there is no basedpyright")
    # It asks the first python on PATH where packages are, and not the option --pythonpath.
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}",
           "PYTHONPATH": str(ROOT / "python")}
    command = [checker, "--verifytypes", "fsdpc", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True,
                          timeout=600)
    found = json.loads(done.stdout)["typeCompleteness"]
    assert Path(found["packageRootDirectory"]) == ROOT / "python" / "fsdpc"
    unknown = [each["name"] for each in found["symbols"] if each["isExported"]
               and not each["isTypeKnown"] and not each["isTypeAmbiguous"]
               and not each["name"].startswith(("fsdpc.torch", "fsdpc.integrations"))]
    assert not unknown, f"nothing says the types of {unknown}"
    score = found["completenessScore"]
    assert score >= COMPLETE, f"{score:.4f} of the public types are known, {COMPLETE} were"
