"""Whatever was changed in a checkpoint is found, and named."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError, CheckpointManager, manifest
from fsdpc.checkpoint.manager import newest_in

from .common import llama, values


def made(folder: Path) -> tuple[dict[str, Any], Path]:
    model = llama()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for p in model.parameters():
        optimizer.set_step_count(p, 1)
    checkpoint.save(folder / "c", state, max_shard_bytes=60_000)
    return state, folder / "c"


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def values_are_nan(state: dict[str, Any]) -> bool:
    """Nothing of a damaged checkpoint is left to go on with, in parameters or states."""
    model, optimizer = state["model"], state["optimizer"]
    held = [view for p in model.parameters()
            for view in (p.local.detach(), *optimizer.state_views(p).values())]  # fmt: skip
    return all(np.isnan(view.numpy()).all() for view in held)


@pytest.mark.ranks([1, 2], timeout=300)
@pytest.mark.parametrize("where", ["header", "data", "manifest.json", "index"])
def test_one_flipped_bit(where: str, tmp_path: Path) -> None:
    state, folder = made(tmp_path)
    before = values(state["model"])
    rng = random.Random(f"{where}")
    files = sorted(folder.glob("*.safetensors"))
    for _ in range(12):
        path = {"manifest.json": folder / where,
                "index": folder / "model.safetensors.index.json"}.get(where, rng.choice(files))
        bits = 8 * path.stat().st_size
        begin = 8 * (8 + int.from_bytes(path.read_bytes()[:8], "little"))
        bit = {"header": lambda b=begin: rng.randrange(b),
               "data": lambda b=begin, e=bits: rng.randrange(b, e)}.get(
                   where, lambda e=bits: rng.randrange(e))()  # fmt: skip
        fsdpc.barrier()
        if fsdpc.rank() == 0:
            flip(path, bit)
        fsdpc.barrier()
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(folder, state)
        assert path.name in str(caught.value), (path, bit)
        if where == "data":
            assert "damaged" in str(caught.value) and "checksum" in str(caught.value)
        assert values_are_nan(state) if where == "data" else values(state["model"]) == before
        fsdpc.barrier()
        if fsdpc.rank() == 0:
            flip(path, bit)
        fsdpc.barrier()
    checkpoint.load(folder, state)
    assert values(state["model"]) == before


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("change", ["cut", "longer", "missing", "swapped", "no manifest"])
def test_other_damage(change: str, tmp_path: Path) -> None:
    state, folder = made(tmp_path)
    files = sorted(folder.glob("*.safetensors"))
    fsdpc.barrier()
    if fsdpc.rank() == 0:
        if change == "cut":
            files[0].write_bytes(files[0].read_bytes()[:-1])
        elif change == "longer":
            files[0].write_bytes(files[0].read_bytes() + b"x")
        elif change == "missing":
            files[0].unlink()
        elif change == "swapped":
            files[0].rename(folder / "x")
            files[1].rename(files[0])
            (folder / "x").rename(files[1])
        else:
            (folder / "manifest.json").unlink()
    fsdpc.barrier()
    if change == "no manifest":
        with pytest.raises(CheckpointError, match="it has no optimizer"):
            checkpoint.load(folder, state)  # a Hugging Face folder as it stands
        return
    with pytest.raises(CheckpointError, match=files[0].name):
        checkpoint.load(folder, state)


@pytest.mark.ranks([1, 2])
def test_a_swapped_tensor_of_the_same_shape(tmp_path: Path) -> None:
    """Two checkpoints' files have the same header; the data tell them apart."""
    checkpoint.save(tmp_path / "a", {"model": llama(seed=1)})
    checkpoint.save(tmp_path / "b", {"model": llama(seed=2)})
    if fsdpc.rank() == 0:
        shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors")
    fsdpc.barrier()
    with pytest.raises(CheckpointError, match="'lm_head.weight' in .*b/model.safetensors"):
        checkpoint.load(tmp_path / "b", {"model": llama()})


@pytest.mark.ranks([1, 2])
def test_the_manager_names_and_skips_the_broken(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    for step in (1, 2, 3, 4):
        manager.save(step, {"model": llama(seed=step)})
    if fsdpc.rank() == 0:
        flip(manager.path(4) / "manifest.json", 99)
        flip(manager.path(3) / "model.safetensors", 8 * 20_000)
    fsdpc.barrier()
    assert [f.step for f in manager.list() if f.problem] == [4]
    model = llama(seed=9)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert manager.restore({"model": model}) == 2
    if fsdpc.rank() == 0:
        assert f"skipping {manager.path(4)}" in said.getvalue()
        assert f"skipping {manager.path(3)}: damaged: " in said.getvalue()
    assert manager.report.extra == {"step": 2}
    assert values(model) == values(llama(seed=2))
    manager.save(4, {"model": model})  # in the place of the broken one
    assert manager.latest() == manager.path(4)
    with pytest.raises(OSError, match="not written over"):
        manager.save(4, {"model": model})


@pytest.mark.ranks([1, 2])
def test_what_the_manager_keeps(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", max_to_keep=2, every_steps=2, keep_every=6)
    state = {"model": fsdpc.nn.Linear(3, 3)}
    saved = [step for step in range(1, 13) if manager.step(step, state)]
    assert saved == [2, 4, 6, 8, 10, 12]
    assert [found.step for found in manager.list()] == [6, 10, 12]
    one = CheckpointManager(tmp_path / "one", max_to_keep=1)
    for step in (10, 5):  # of a run that went back: what it has just saved is not the one to go
        one.save(step, state)
    assert [found.step for found in one.list()] == [5, 10]
    one.save(12, state)
    assert [found.step for found in one.list()] == [12]
    timed = CheckpointManager(tmp_path / "timed", every_seconds=0.001, async_=True)
    while not timed.step(1, state):
        pass
    timed.wait()
    assert [found.step for found in timed.list()] == [1]
    assert CheckpointManager(tmp_path / "none").restore(state) is None
    if fsdpc.rank() == 0:
        one.path(12).rename(tmp_path / "one" / "step-0000000012")  # a name of somebody else's
    fsdpc.barrier()
    assert one.list() == [] and one.latest() is None


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("extra", [None, "a word"])
def test_the_manifest_says_which_step_it_is(extra: str | None, tmp_path: Path) -> None:
    """Folders that were renamed or copied are found by their names, and count by what they hold."""
    manager = CheckpointManager(tmp_path / "run", max_to_keep=2)
    for step in (2, 4):
        manager.save(step, {"model": llama(seed=step), "extra": extra})
    if fsdpc.rank() == 0:
        shutil.copytree(manager.path(2), manager.path(9))
        shutil.copytree(manager.path(4), manager.path(3))
    fsdpc.barrier()
    found = [(each.step, each.path.name[-1], each.renamed) for each in manager.list()]
    assert found == [(2, "9", True), (2, "2", False), (4, "3", True), (4, "4", False)]
    assert manager.latest() == manager.path(4)
    assert checkpoint.inspect(manager.path(9)).step == 2
    fsdpc.barrier()
    if fsdpc.rank() == 0:
        shutil.rmtree(manager.path(3))
        shutil.rmtree(manager.path(4))
        shutil.rmtree(manager.path(2))
    fsdpc.barrier()
    model, said = llama(seed=9), io.StringIO()
    with contextlib.redirect_stderr(said):
        assert manager.restore({"model": model}) == 2
    assert values(model) == values(llama(seed=2))
    assert ("step-00000009 holds step 2" in said.getvalue()) == (fsdpc.rank() == 0)
    for step in (5, 6, 7):  # and what somebody put there is not deleted
        manager.save(step, {"model": model})
    assert [each.path.name[-1] for each in manager.list()] == ["9", "6", "7"]


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("taken", [False, True])
def test_a_save_renames_what_has_its_name(taken: bool, tmp_path: Path) -> None:
    """The start says which folder that is, with a command that works."""
    first = CheckpointManager(tmp_path / "run")
    for step in (2, 4):
        first.save(step, {"model": llama(seed=step)})
    wrong = first.path(9)
    if fsdpc.rank() == 0:
        move = shutil.copytree if taken else shutil.move
        move(first.path(2), wrong)
    fsdpc.barrier()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        manager = CheckpointManager(tmp_path / "run", every_steps=9)
        assert manager.restore({"model": llama()}) == 4
        free = tmp_path / "run" / ("step-00000002-copy1" if taken else "step-00000002")
        if fsdpc.rank() == 0:
            assert f"not named for its step, 2: a save of step 9 would rename it; to do so now: " \
                f"mv {wrong} {free}\n" in said.getvalue()  # fmt: skip
        assert manager.step(9, {"model": llama(seed=9)})
    assert checkpoint.inspect(free).step == 2 and checkpoint.inspect(wrong).step == 9
    assert (f"is {free} now" in said.getvalue()) == (fsdpc.rank() == 0)



@pytest.mark.ranks([1])
def test_older_checkpoints_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start, a search and a save read as few manifests of 40 as of 4."""
    read: list[str] = []
    look = manifest.read
    monkeypatch.setattr(manifest, "read", lambda path: (read.append(path.name), look(path))[1])
    counts = []
    for kept in (4, 40):
        folder = tmp_path / str(kept)
        first = CheckpointManager(folder)
        for step in range(1, kept + 1):
            first.save(step, {"model": fsdpc.nn.Linear(1, 1)})
        read.clear()
        manager = CheckpointManager(folder, max_to_keep=kept, keep_every=1, every_steps=1)
        assert manager.latest() == newest_in(folder) == manager.path(kept)
        counts.append(len(read))
        manager.max_to_keep = 2
        manager.step(kept + 1, {"model": fsdpc.nn.Linear(1, 1)})
        counts.append(len(read))
        assert len(manager.list()) == kept + 1
    assert counts[:2] == counts[2:] and counts[1] < 8
