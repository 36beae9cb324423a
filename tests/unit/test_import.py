"""What ``import fsdpc`` costs: little time, nothing foreign, nothing started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsdpc

PACKAGE = Path(fsdpc.__file__).parent

PROBE = """
import os, sys, time
import numpy
before = set(sys.modules), set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
begin = time.process_time()
import fsdpc.integrations
print(time.process_time() - begin)
tops = {name.split(".")[0] for name in set(sys.modules) - before[0]}
print(sorted(tops - sys.stdlib_module_names - {"fsdpc", "numpy"}))
print(set(os.listdir("/proc/self/fd")) == before[1])
print(len(os.listdir("/proc/self/task")) == before[2])
"""


def probe() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    return done.stdout.splitlines()


def test_it_takes_a_tenth_of_a_second_beyond_numpy() -> None:
    # Processor time, the best of a few: the machine may be busy with other tests.
    assert min(float(probe()[0]) for _ in range(5)) < 0.1


def test_it_brings_and_starts_nothing() -> None:
    _, foreign, same_descriptors, same_threads = probe()
    assert foreign == "[]"
    assert (same_descriptors, same_threads) == ("True", "True")


def test_it_is_small() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    plugins = set(PACKAGE.glob("libfsdpc_*.so"))  # built where there is a compiler for them
    ours = [path for path in files if path not in plugins and path.parent.name != "__pycache__"]
    assert sum(path.stat().st_size for path in ours) < 10 << 20
