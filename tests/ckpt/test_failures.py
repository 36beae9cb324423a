"""A call to the file system that fails on one rank fails the save on all, and leaves nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc import checkpoint
from tests.faults.common import SOON_S, build, step

from .common import hooked, llama, values


def calls_of(path: Path, model: Any) -> list[tuple[str, str]]:
    """What a save on this rank asks of the file system."""
    seen: list[tuple[str, str]] = []
    with hooked(lambda call, where: seen.append((call, where))):
        checkpoint.save(path, {"model": model})
    return seen


@pytest.mark.ranks([1, 2, 3], timeout=300)
@pytest.mark.parametrize("async_", [False, True])
def test_every_call_may_fail_on_one_rank(async_: bool, tmp_path: Path) -> None:
    model = llama()
    counts = fsdpc.all_gather(len(calls_of(tmp_path / "first", model))).reshape(-1)
    open_before: set[str] = set()
    for victim in range(fsdpc.world_size()):
        for k in range(int(counts[victim])):
            left = k

            def fail(call: str, where: str, victim: int = victim) -> None:
                nonlocal left
                left -= 1
                if left == -1 and fsdpc.rank() == victim:
                    raise OSError(28, "No space left on device")

            with hooked(fail), pytest.raises(OSError, match="No space left") as caught:
                handle = checkpoint.save(tmp_path / "c", {"model": model}, async_=async_)
                if handle is not None:
                    handle.wait()
            if fsdpc.world_size() > 1:
                assert f"rank {victim}: " in str(caught.value)
            fsdpc.barrier()
            assert os.listdir(tmp_path) == ["first"], (victim, k)
            fsdpc.barrier()
            open_now = set(os.listdir("/proc/self/fd"))
            open_before = open_before or open_now
            assert open_now == open_before, (victim, k)
    checkpoint.save(tmp_path / "c", {"model": model})
    fsdpc.barrier()  # rank 0 gives its claim up when the others may be on already
    assert sorted(os.listdir(tmp_path)) == ["c", "first"]


FAULTS = {  # the call, and what the kernel says to it
    "disk full": ("pwrite", 28, "No space left on device"),
    "quota": ("fsync", 122, "Disk quota exceeded"),
    "read-only": ("open", 30, "Read-only file system"),
    "vanished": ("open", 2, "No such file or directory"),
}


@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("async_", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_raised_within_a_second_and_training_goes_on(
    fault: str, async_: bool, tmp_path: Path
) -> None:
    """Whichever rank it happens on; the run is to the bit the one that never saved."""
    call, number, words = FAULTS[fault]
    model, twin = build(), build()
    optimizer, other = (fsdpc.optim.AdamW(m.parameters()) for m in (model, twin))
    state = {"model": model, "optimizer": optimizer}
    for victim in range(fsdpc.world_size()):
        step(model, optimizer, seed=victim)
        step(twin, other, seed=victim)
        failed_at = 0.0

        def fail(seen: str, where: str, victim: int = victim) -> None:
            nonlocal failed_at
            if seen == call and fsdpc.rank() == victim:
                failed_at = time.monotonic()
                raise OSError(number, words)

        with hooked(fail), pytest.raises(OSError, match=words):
            handle = checkpoint.save(tmp_path / "c", state, async_=async_)
            if handle is not None:
                handle.wait()
        assert time.monotonic() - fsdpc.all_reduce(failed_at, "max") < SOON_S
        assert not list(tmp_path.iterdir())
        fsdpc.barrier()
    assert step(model, optimizer) == step(twin, other)
    assert values(model) == values(twin)
    checkpoint.save(tmp_path / "c", state)
    checkpoint.load(tmp_path / "c", state)
    assert values(model) == values(twin)


@pytest.mark.ranks([2, 3])
def test_what_the_kernel_itself_refuses_to_one_rank(tmp_path: Path) -> None:
    """A limit on the size of files, of the last rank alone."""
    model = llama()
    last = fsdpc.rank() == fsdpc.world_size() - 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    with pytest.raises(OSError, match=f"rank {fsdpc.world_size() - 1}: .*File too large"):
        checkpoint.save(tmp_path / "c", {"model": model})
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    fsdpc.barrier()
    assert not list(tmp_path.iterdir())
    fsdpc.barrier()
    checkpoint.save(tmp_path / "c", {"model": model})


FULL_DISK = """
import os, sys
import fsdpc
from fsdpc import checkpoint
fsdpc.init()
folder = sys.argv[1]
def state(rows):
    return {"model": fsdpc.fully_shard(fsdpc.nn.Linear(256, rows, bias=False))}
for async_ in (False, True):
    try:
        handle = checkpoint.save(f"{folder}/c", state(2048), async_=async_)
        handle and handle.wait()
    except OSError as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError("2 MiB fit into 1")
    fsdpc.barrier()
    assert os.listdir(folder) == [], os.listdir(folder)
    fsdpc.barrier()
checkpoint.save(f"{folder}/c", state(512))
checkpoint.load(f"{folder}/c", state(512))
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """One of 1 MiB, in a mount namespace where such may be made; then what fits is saved."""
    mount = ["unshare", "-rm", "sh", "-ec", 'mount -t tmpfs -o size=1m none "$0"; exec "$@"']
    disk, script = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(FULL_DISK)
    try:
        subprocess.run([*mount, disk, "true"], check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespaces here")
    command = [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", script, disk]
    done = subprocess.run([*mount, disk, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ranks([2, 3])
def test_a_folder_that_vanishes_under_a_save(tmp_path: Path) -> None:
    """It is moved away just before the last rank opens its file; it comes back with a left-over."""
    model = llama()
    folder = tmp_path / "run"
    manager = checkpoint.CheckpointManager(folder)
    gone = False

    def move(call: str, where: str) -> None:
        nonlocal gone
        if call == "open" and fsdpc.rank() == fsdpc.world_size() - 1 and not gone:
            gone = True
            folder.rename(tmp_path / "moved")

    with hooked(move), pytest.raises(OSError, match="No such file"):
        manager.save(1, {"model": model})
    left = [".lock", ".step-00000001.lock", ".step-00000001.saving"]
    assert sorted(os.listdir(tmp_path / "moved")) == left
    fsdpc.barrier()
    if fsdpc.rank() == 0:
        (tmp_path / "moved").rename(folder)
    fsdpc.barrier()
    assert manager.latest() is None
    manager.save(1, {"model": model})
    fsdpc.barrier()
    assert sorted(os.listdir(folder)) == [".lock", "step-00000001"]
    fsdpc.barrier()


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("problem", ["read-only", "a file", "there already"])
def test_folders_that_cannot_be_written(problem: str, tmp_path: Path) -> None:
    model = llama()
    before = values(model)
    folder = tmp_path / "folder"
    if fsdpc.rank() == 0:
        if problem == "a file":
            folder.write_text("x")
        else:
            (folder / "c").mkdir(parents=True)
        if problem == "read-only":
            if os.geteuid() == 0:  # who may write anywhere: as the kernel would answer others
                (folder / "c").rmdir()
            else:
                (folder / "c").rmdir()
                folder.chmod(0o500)
    fsdpc.barrier()

    def refuse(call: str, where: str) -> None:
        if problem == "read-only" and call == "mkdir" and os.geteuid() == 0:
            raise PermissionError(13, "Permission denied")

    want = {"read-only": "Permission", "a file": "File exists",
            "there already": "not written over"}[problem]  # fmt: skip
    with hooked(refuse), pytest.raises(OSError, match=want):
        checkpoint.save(folder / "c", {"model": model})
    assert values(model) == before


@pytest.mark.ranks([1, 2])
def test_folders_with_names_of_any_bytes(tmp_path: Path) -> None:
    """Saved and loaded; every rank raises an error in one, not only its owner."""
    folder = tmp_path / os.fsdecode(b"\xff\xc3")
    state = {"model": llama()}
    before = values(state["model"])
    checkpoint.save(folder, state)
    checkpoint.load(folder, state)
    assert values(state["model"]) == before
    with pytest.raises(OSError, match="xff.* is not written over"):
        checkpoint.save(folder, state)
    with pytest.raises(checkpoint.CheckpointError, match="does not exist"):
        checkpoint.load(folder / "c" if fsdpc.rank() == 0 else folder, state)


@pytest.mark.ranks([1, 2])
def test_a_read_that_fails_on_one_rank(tmp_path: Path) -> None:
    model = llama()
    checkpoint.save(tmp_path / "c", {"model": model})

    def fail(call: str, where: str) -> None:
        if call == "pread" and fsdpc.rank() == fsdpc.world_size() - 1:
            raise OSError(5, "Input/output error")

    with hooked(fail), pytest.raises(OSError, match="Input/output error"):
        checkpoint.load(tmp_path / "c", {"model": model})
    checkpoint.load(tmp_path / "c", {"model": model})


@pytest.mark.ranks([1, 2])
def test_errors_of_async_saves_are_not_lost(tmp_path: Path) -> None:
    model = llama()

    def fail(call: str, where: str) -> None:
        if call == "fsync":
            raise OSError(5, "Input/output error")

    with hooked(fail):
        handle = checkpoint.save(tmp_path / "c", {"model": model}, async_=True)
        while not handle.done:
            time.sleep(0)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.save(tmp_path / "d", {"model": model})
    checkpoint.save(tmp_path / "d", {"model": model})  # said once
