"""Saves on a thread: one at a time, without the GIL, and no error of theirs is lost."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint, nn
from tests.faults.common import build, step

from .common import hooked, llama, values


@pytest.mark.ranks([1, 2])
def test_the_thread_never_needs_the_gil(tmp_path: Path) -> None:
    """The save is committed while this thread holds the GIL from its beginning on."""
    held = ctypes.PyDLL(None)  # its functions keep the GIL, unlike os.path.exists
    path = os.fsencode(tmp_path / "c" / "manifest.json")
    sys.setswitchinterval(1000)  # nobody is asked to give it up
    handle = checkpoint.save(tmp_path / "c", {"model": llama()}, async_=True)
    deadline = time.monotonic() + 30
    while held.access(path, os.F_OK) != 0 and time.monotonic() < deadline:
        pass
    assert held.access(path, os.F_OK) == 0
    handle.wait()


@pytest.mark.ranks([1, 2])
def test_one_is_under_way_at_a_time(tmp_path: Path) -> None:
    model = llama()
    handles = []
    for i in range(4):
        handles.append(checkpoint.save(tmp_path / str(i), {"model": model}, async_=True))
        assert all(handle.done for handle in handles[:-1])
        assert sorted(os.listdir(tmp_path))[-i:] == [str(k) for k in range(i)] or i == 0
    checkpoint.load(tmp_path / "3", {"model": model})  # waits for the one that makes it


@pytest.mark.ranks([1, 2])
def test_training_goes_on_under_a_save(tmp_path: Path) -> None:
    """What is saved is what was there when the save began, whatever steps are made meanwhile."""
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    before = values(model)
    with hooked(lambda call, path: time.sleep(0.002)):  # a slow disk: many steps go by
        handle = checkpoint.save(
            tmp_path / "c", {"model": model, "optimizer": optimizer}, async_=True
        )
        for _ in range(10):
            step(model, optimizer)
        handle.wait()
    assert values(model) != before
    checkpoint.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert values(model) == before


@pytest.mark.ranks([1, 2])
def test_the_copy_is_exact(tmp_path: Path) -> None:
    """Pieces of any length and alignment, through other dtypes too."""


    class Vectors(nn.Module):
        def forward(self) -> None:
            return None

    model = Vectors()
    rng = np.random.default_rng(0)
    for i, rows in enumerate([1, 7, 64, 129, 40_001]):
        value = fsdpc.tensor(rng.normal(size=(rows, 3)).astype(np.float32))
        model.register_parameter(f"p{i}", nn.Parameter(value))
    fsdpc.fully_shard(model)
    for name, dtype in (("own", None), ("half", "bfloat16")):
        state = {"model": model}
        checkpoint.save(tmp_path / name, state, dtype=dtype, async_=True).wait()
        checkpoint.save(tmp_path / f"{name}-sync", state, dtype=dtype)
        a, b = ((tmp_path / n / "model.safetensors").read_bytes() for n in (name, f"{name}-sync"))
        assert a == b, name


def test_at_exit_it_is_waited_for_and_its_error_said(tmp_path: Path) -> None:
    script = f"""
import fsdpc, sys
from fsdpc import checkpoint
from fsdpc.checkpoint import saving
def fail(call, path):
    if call == sys.argv[1]:
        raise OSError(28, "No space left on device")
saving._hook = fail
fsdpc.init()
checkpoint.save({str(tmp_path / "c")!r}, {{"model": fsdpc.nn.Linear(3, 3)}}, async_=True)
"""
    for call, there in (("fsync", False), ("none", True)):
        done = subprocess.run(
            [sys.executable, "-c", script, call], capture_output=True, text=True, timeout=60
        )
        assert (tmp_path / "c" / "manifest.json").exists() == there, done.stderr
        assert ("No space left on device" in done.stderr) != there, done.stderr
