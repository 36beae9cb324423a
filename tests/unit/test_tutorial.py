"""docs/tutorial.md: its script and its commands run, and the numbers are as equal as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdpc

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run the page in a folder; what each command printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "train.py").write_text("\n".join(blocks("python")))
    path = os.pathsep.join([str(Path(fsdpc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "FSDPC_THREADS": "1"}
    texts = []
    for command in blocks("sh"):
        command = re.sub(r"^python\b", sys.executable, command)
        command = re.sub(r"\bfsdpc (?=[a-z])", f"{sys.executable} -m fsdpc ", command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        texts.append(done.stdout + done.stderr)
    return texts


def norms(text: str) -> dict[int, str]:
    """Step -> the norm as printed, the last one where a step was repeated."""
    return {int(step): norm for step, norm in re.findall(r"step (\d+): gradient norm (\S+)", text)}


def test_the_numbers_do_not_depend_on_the_ranks(said: list[str]) -> None:
    _, one, two, _, four, whole, _ = map(norms, said)
    assert list(one) == list(range(1, 5)) and list(two) == list(range(1, 9))
    assert list(four) == list(range(9, 13)) and list(whole) == list(range(1, 13))
    assert one == {step: whole[step] for step in one}
    assert two | four == whole


def test_a_drill_is_survived(said: list[str]) -> None:
    last = said[-1]
    assert "PeerError" in last and list(norms(last)) == list(range(13, 17))


def test_the_machine_and_the_checkpoints_are_shown(said: list[str]) -> None:
    assert "isa" in said[0] and "step-00000008" in said[3]
