"""Saves on a thread: one at a time, without the GIL, and no error of theirs is lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
        assert {str(k) for k in range(i)} <= set(os.listdir(tmp_path))  # this one may be, too
    checkpoint.load(tmp_path / "3", {"model": model})  # waits for the one that makes it


def train_under_a_save(tmp_path: Path) -> None:
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
def test_training_goes_on_under_a_save(tmp_path: Path) -> None:
    train_under_a_save(tmp_path)


@pytest.mark.ranks(4, hosts=2)
def test_training_goes_on_under_a_save_of_several_hosts(tmp_path: Path) -> None:
    """The save's thread and this one talk to other hosts at once."""
    train_under_a_save(tmp_path)


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


@contextlib.contextmanager
def no_more_memory(room: int, here: bool) -> Iterator[None]:
    """This process may map so many bytes more, if it is meant."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if here:
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE") + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.ranks([1, 2])
def test_a_rank_without_memory_for_the_copy(tmp_path: Path) -> None:
    """Every rank raises what was missing where, and the next save works."""
    last = fsdpc.world_size() - 1
    with fsdpc.deferred_init():  # so that no memory of former values is there to be used again
        state = {"model": nn.Linear(4096, 2048, bias=False)}
    fsdpc.fully_shard(state["model"])
    with no_more_memory(6 << 20, fsdpc.rank() == last):
        handle = checkpoint.save(tmp_path / "c", state, async_=True)
        with pytest.raises(MemoryError, match="no memory for .* bytes") as caught:
            handle.wait()
    assert last == 0 or f"rank {last}: " in str(caught.value)
    fsdpc.barrier()
    assert not list(tmp_path.iterdir())
    fsdpc.barrier()
    checkpoint.save(tmp_path / "c", state, async_=True).wait()


@pytest.mark.ranks([1, 2])
def test_a_rank_that_cannot_start_a_thread(tmp_path: Path) -> None:
    """It saves on the calling thread: the others do not wait for one that never comes."""
    state = {"model": fsdpc.fully_shard(nn.Linear(3, 3))}
    last = fsdpc.rank() == fsdpc.world_size() - 1
    checkpoint.save(tmp_path / "warm", state)
    enough = threading.Event()
    others = [threading.Thread(target=enough.wait) for _ in range(8)]
    for thread in others:  # they take the stacks that the C library kept of ended threads
        thread.start()
    with no_more_memory(4 << 20, last):  # a stack takes 8 MiB
        handle = checkpoint.save(tmp_path / "c", state, async_=True)
        assert handle.done or not last
        handle.wait()
    enough.set()
    for thread in others:
        thread.join()
    checkpoint.load(tmp_path / "c", state)


@pytest.mark.ranks(1, init=False)
def test_at_exit_of_several_ranks(tmp_path: Path) -> None:
    """Each waits for its part, so that the checkpoint is there; all ranks raise an error."""
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    for call, there in (("none", True), ("fsync", False)):
        done = subprocess.run(
            [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", str(script), call,
             str(tmp_path / call)], capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert (tmp_path / call / "manifest.json").exists() == there, done.stdout
        assert done.stdout.count("rank 1: fsync") == (0 if there else 2), done.stdout


AT_EXIT = """
import fsdpc, sys
from fsdpc import checkpoint
from fsdpc.checkpoint import saving
fsdpc.init()
def fail(call, path):
    if call == sys.argv[1] and fsdpc.rank() == 1:
        raise OSError(28, "No space left on device")
saving._hook = fail
checkpoint.save(sys.argv[2], {"model": fsdpc.fully_shard(fsdpc.nn.Linear(3, 3))}, async_=True)
"""


@pytest.mark.ranks(1)
def test_ctrl_c_while_waiting(tmp_path: Path) -> None:
    """It is heard at once, and the save goes on: its end can be waited for again."""
    go_on = threading.Event()
    with hooked(lambda call, path: go_on.wait()):
        handle = checkpoint.save(tmp_path / "c", {"model": llama()}, async_=True)
        for wait in (handle.wait, lambda: checkpoint.save(tmp_path / "d", {"model": llama()})):
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            timer.join()
            assert not handle.done
        go_on.set()
        handle.wait()
    checkpoint.load(tmp_path / "c", {"model": llama()})
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


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
            [sys.executable, "-c", script, call], capture_output=True, text=True, timeout=300
        )
        assert (tmp_path / "c" / "manifest.json").exists() == there, done.stderr
        assert ("No space left on device" in done.stderr) != there, done.stderr
