"""A call to the file system that fails on one rank fails the save on all, and leaves nothing."""

from __future__ import annotations

import os
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


@pytest.mark.ranks([1, 2, 3], timeout=120)
@pytest.mark.parametrize("async_", [False, True])
def test_every_call_may_fail_on_one_rank(async_: bool, tmp_path: Path) -> None:
    model = llama()
    counts = fsdpc.all_gather(len(calls_of(tmp_path / "first", model))).reshape(-1)
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
    checkpoint.save(tmp_path / "c", {"model": model})
    assert sorted(os.listdir(tmp_path)) == ["c", "first"]


@pytest.mark.ranks([1, 3])
def test_it_is_raised_within_a_second_and_training_goes_on(tmp_path: Path) -> None:
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    failed_at = 0.0

    def fail(call: str, where: str) -> None:
        nonlocal failed_at
        if call == "fsync" and fsdpc.rank() == fsdpc.world_size() - 1:
            failed_at = time.monotonic()
            raise OSError(122, "Disk quota exceeded")

    with hooked(fail), pytest.raises(OSError, match="quota"):
        checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert time.monotonic() - fsdpc.all_reduce(failed_at, "max") < SOON_S
    step(model, optimizer)
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    checkpoint.load(tmp_path / "c", {"model": model, "optimizer": optimizer})


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("problem", ["read-only", "vanished", "a file", "there already"])
def test_folders_that_cannot_be_written(problem: str, tmp_path: Path) -> None:
    model = llama()
    before = values(model)
    folder = tmp_path / "folder"
    if fsdpc.rank() == 0:
        if problem == "a file":
            folder.write_text("x")
        elif problem != "vanished":
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

    want = {"read-only": "Permission", "vanished": "No such", "a file": "Not a directory",
            "there already": "not written over"}[problem]  # fmt: skip
    with hooked(refuse), pytest.raises(OSError, match=want):
        checkpoint.save(folder / "c", {"model": model})
    assert values(model) == before


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
