"""Checkpoints of what lies on a disk are those of memory, and go from one to the other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc import checkpoint
from tests.faults.common import run
from tests.faults.test_offload import corrupt
from tests.offload import build, everything, on_disk, optimizer_of, train

from .common import hooked

BOTH = ("masters", "optimizer")
ALL = ("params", "gradients", *BOTH)


def state(
    folder: Path, *classes: str, fraction: float = 1.0, kind: str = "AdamW", **of: Any
) -> Any:
    """A model and its optimizer, with these on the disk."""
    model = build(offload_policy=on_disk(folder, *classes, fraction=fraction), **of)
    return {"model": model, "optimizer": optimizer_of(model, kind)}


def go(held: Any, *steps: int) -> list[float]:
    return train(held["model"], held["optimizer"], range(*steps))


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"}


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("kind", ["AdamW", "bf16 states", "SGD"])
def test_resume_across_policies(kind: str, disk: Path, tmp_path: Path) -> None:
    """The files have the bytes of memory's, and whoever loads them goes on with the same bits."""
    places: list[tuple[tuple[str, ...], float]] = [
        ((), 1.0), (BOTH, 1.0), (("optimizer",), 0.4), (ALL, 0.4), (("masters",), 1.0)
    ]  # fmt: skip
    for i, (classes, fraction) in enumerate(places):
        first = state(disk, *classes, fraction=fraction, kind=kind)
        go(first, 2)
        checkpoint.save(tmp_path / str(i), first)
        assert files_of(tmp_path / str(i)) == files_of(tmp_path / "0"), classes
        losses = go(first, 2, 4)
        if i == 0:
            expected = losses, everything(**first)
        assert (losses, everything(**first)) == expected, classes
    for i, (classes, fraction) in enumerate(reversed(places)):
        resumed = state(disk, *classes, fraction=fraction, kind=kind)
        if i % 2:  # over states that steps have made, and over none
            go(resumed, 1)
        checkpoint.load(tmp_path / str(i), resumed)
        assert (go(resumed, 2, 4), everything(**resumed)) == expected, classes


@pytest.mark.ranks(1, init=False)
def test_other_numbers_of_ranks(disk: Path, tmp_path: Path) -> None:
    def saved(rank: int) -> Any:
        fsdpc.init()
        first = state(disk, *BOTH)
        go(first, 3)
        checkpoint.save(tmp_path / "c", first)
        found = everything(**first)
        fsdpc.barrier()
        return found

    def loaded(rank: int) -> Any:
        fsdpc.init()
        second = state(disk, *BOTH, fraction=0.6, strategy="SHARD_GRAD_OP")
        checkpoint.load(tmp_path / "c", second)
        found = everything(**second)
        go(second, 3, 4)
        fsdpc.barrier()
        return found

    assert [*run(saved, 2), *run(loaded, 4), *run(loaded, 1)].count(run(loaded, 3)[2]) == 7


@pytest.mark.ranks([1, 2])
def test_training_goes_on_under_a_save(disk: Path, tmp_path: Path) -> None:
    first = state(disk, *BOTH)
    go(first, 2)
    before = everything(**first)
    with hooked(lambda call, path: time.sleep(0.002)):  # a slow disk: steps go by
        handle = checkpoint.save(tmp_path / "c", first, async_=True)
        losses = go(first, 2, 6)
        handle.wait()
    after = everything(**first)
    checkpoint.load(tmp_path / "c", first)
    assert everything(**first) == before
    assert (go(first, 2, 6), everything(**first)) == (losses, after)


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("what", BOTH)
def test_what_changed_on_the_disk_is_not_saved(what: str, disk: Path, tmp_path: Path) -> None:
    first = state(disk, what)
    go(first, 2)
    fsdpc.full_tensor(first["model"].head.weight)  # the step has ended
    fsdpc.barrier()
    last = fsdpc.world_size() - 1
    if fsdpc.rank() == last:
        corrupt(disk)
    with pytest.raises(OSError, match=rf"chunk 0 of .*rank {last}.*CRC-32C"):
        checkpoint.save(tmp_path / "c", first)
    fsdpc.barrier()
    assert not (tmp_path / "c").exists()
