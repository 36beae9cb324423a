"""A model that does not fit into the memory allowed trains from a disk, with the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
#: More than two ranks take with all of a 41M LLaMA on a disk (350 MiB with AMX's packed operands);
#: its shards alone are 312 MB of each.
LIMIT = 390 << 20
TRAIN = [sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--preset", "41M", "--batch", "1",
         "--seq", "64", "--steps", "2", "--reduce-dtype", "bf16", "--eval-bytes", "0",
         "--sample", "0"]  # fmt: skip
TIMEOUT_S = 600


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this size, without swap."""
    first = ROOT / "memory" if (ROOT / "memory" / "memory.limit_in_bytes").exists() else ROOT
    path = first / f"fsdpc-test-{os.getpid()}"
    names = {"memory.limit_in_bytes": LIMIT, "memory.memsw.limit_in_bytes": LIMIT}
    if first is ROOT:
        names = {"memory.max": LIMIT, "memory.swap.max": 0}
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        for name, value in names.items():
            if (path / name).exists():
                (path / name).write_text(str(value))
        if not (path / next(iter(names))).exists():
            pytest.skip("control groups do not limit memory here")
        yield path
    except OSError as error:
        pytest.skip(f"no control group can be limited: {error}")
    finally:
        path.rmdir()


def train(group: Path | None, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it, in a group if one is given."""
    command = [*TRAIN, *options]
    if group is not None:
        join = 'echo $$ > "$0" && exec "$@"'
        command = ["sh", "-c", join, str(group / "cgroup.procs"), *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def crc(done: subprocess.CompletedProcess[str]) -> str:
    """What a run says of its parameters."""
    found = re.search(r"crc32c ([0-9a-f]{8})", done.stdout)
    assert done.returncode == 0 and found, done.stdout + done.stderr
    return found[1]


def test_a_model_trains_in_less_memory_than_its_shards_take(group: Path, disk: Path) -> None:
    everything = f"params=disk:{disk},masters=disk,optimizer=disk,gradients=disk"
    assert crc(train(group, "--offload", everything)) == crc(train(None))
    without = train(group)
    assert without.returncode != 0 and "killed by SIGKILL" in without.stdout + without.stderr
    assert not list(disk.iterdir())
