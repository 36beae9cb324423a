"""Signals that stop a run: all ranks save the same step; the page's script for SLURM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fsdpc
from fsdpc.checkpoint import CheckpointManager
from fsdpc.checkpoint.stops import StopSignals

ROOT = Path(__file__).resolve().parents[2]
JOB = "4711"


def state() -> dict[str, object]:
    return {"model": fsdpc.fully_shard(fsdpc.nn.Linear(3, 2))}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda each: each.name)
@pytest.mark.parametrize("async_", [False, True], ids=["at once", "on a thread"])
def test_a_signal_to_one_rank_stops_all(
    signum: signal.Signals, async_: bool, tmp_path: Path
) -> None:
    made = state()
    manager = CheckpointManager(tmp_path, every_steps=100, async_=async_)
    manager.stop_at_signals()
    manager.stop_at_signals()  # once more changes nothing
    for step in range(1, 6):
        if step == 3 and fsdpc.rank() == 1:
            os.kill(os.getpid(), signum)
        assert manager.step(step, made) == manager.stopped == (step == 3)
        if manager.stopped:
            break
    assert [found.step for found in manager.list()] == [3]  # of the async one too: it was waited
    assert not manager.step(4, made)  # a loop that goes on saves no further step
    assert manager.stopped and signal.getsignal(signum) == manager._signals._ask


@pytest.mark.ranks(1)
def test_handlers_come_and_go(tmp_path: Path) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    manager = CheckpointManager(tmp_path)
    assert not manager.step(1, {}) and not manager.stopped
    signals = StopSignals()
    assert not signals.agree() and signals.name == ""
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.agree() and signals.name == "SIGUSR1"
    signals.restore()
    assert before == {each: signal.getsignal(each) for each in before}


@pytest.mark.ranks(1)
def test_another_thread_is_refused(tmp_path: Path) -> None:
    manager, found = CheckpointManager(tmp_path), []

    def ask() -> None:
        with pytest.raises(ValueError, match="main thread") as caught:
            manager.stop_at_signals()
        found.append(caught)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found


# ---- the script for sbatch, under bash: srun and scontrol are stand-ins ----

SRUN = '#!/bin/bash\necho $$ > "$FOLDER/pid"\nshift\nexec "$@"\n'
SCONTROL = '#!/bin/bash\necho "$@" >> "$FOLDER/scontrol"\n'
TRAIN = f"""#!/bin/bash
exec {sys.executable} -m fsdpc "$@" --batch 2 --seq 32 --sample 0 --eval-bytes 0 --data {__file__}
"""


def job(folder: Path, steps: int) -> str:
    """The page's script, of two ranks and so many steps."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    text = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.S)[1]
    for pattern, here in (("--ranks 8", "--ranks 2"), (r"(?m)^steps=\d+$", f"steps={steps}"),
                          (r"(?m)^run=.*$", f"run={folder}/run")):  # fmt: skip
        text, count = re.subn(pattern, here, text)
        assert count == 1, pattern
    return text


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "FOLDER": str(folder), "SLURM_JOB_ID": JOB,
                   "PATH": f"{folder}/bin:{os.environ['PATH']}",
                   "PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}  # fmt: skip
    return subprocess.Popen(["bash", "-c", job(folder, steps)], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def test_the_script_of_the_page_saves_and_is_requeued(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("fsdpc", TRAIN)):
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    with start(tmp_path, 5000) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "step 1/5000" in line:
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGUSR1)
        said = "".join(lines)
        assert process.wait(60) == 0, said
    stopped = int(re.search(r"stopped by SIGUSR1 after step (\d+)", said)[1])
    assert (tmp_path / "scontrol").read_text() == f"requeue {JOB}\n"
    with start(tmp_path, stopped + 2) as process:  # as SLURM starts it again
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and f"resumed after step {stopped}" in said
    assert (tmp_path / "scontrol").read_text() == f"requeue {JOB}\n"  # this time it was not
