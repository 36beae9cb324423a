"""A folder belongs to one run: the second is refused by name, a killed one is in nobody's way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from fsdpc import checkpoint, nn
from fsdpc.checkpoint import CheckpointManager
from fsdpc.checkpoint.claim import claim_folder
from tests.faults.common import die, run

from .common import hooked, llama, values

TAKEN = r"belongs to another run: process \d+ on \S+ \(\S+\) saves there"

OTHER = """
import sys, fsdpc
from fsdpc import checkpoint, nn
fsdpc.init()
how, path = sys.argv[1:]
state = {"model": nn.Linear(3, 3)}
if how == "save":
    checkpoint.save(path, state, overwrite=True)
elif how == "async":
    checkpoint.save(path, state, async_=True, overwrite=True).wait()
elif how == "late":
    checkpoint.CheckpointManager(path).save(9, state)
else:
    checkpoint.CheckpointManager(path, every_steps=5)
"""


def other(how: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", OTHER, how, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("async_", [False, True])
def test_a_second_save_of_a_name_is_refused(async_: bool, tmp_path: Path) -> None:
    folder, found = tmp_path / "new" / "last", []

    def meanwhile(call: str, where: str) -> None:
        if call == "rename":
            found.extend(other(how, folder) for how in ("save", "async"))

    with hooked(meanwhile):
        handle = checkpoint.save(folder, {"model": nn.Linear(3, 3)}, async_=async_)
        if handle is not None:
            handle.wait()
    assert len(found) == 2
    for done in found:
        assert done.returncode == 1
        assert f"{os.getpid()} on" in done.stderr and "belongs to another run" in done.stderr
    assert os.listdir(folder.parent) == ["last"]
    assert checkpoint.load(folder, {"model": nn.Linear(3, 3)}).missing == []


@pytest.mark.ranks(1)
def test_a_managers_folder_is_its_own(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(3, 3)}
    manager = CheckpointManager(tmp_path / "run", every_steps=5)
    CheckpointManager(tmp_path / "run", every_steps=5)  # of the same run
    for how in ("manager", "late"):
        done = other(how, tmp_path / "run")
        assert done.returncode == 1 and f"{os.getpid()} on" in done.stderr, done.stderr
    train = [sys.executable, "-m", "fsdpc", "train", "--checkpoint", str(tmp_path / "run")]
    done = subprocess.run(
        [*train, "--resume", "--steps", "1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "belongs to another run" in done.stderr, done.stderr
    manager.save(1, state)
    del manager
    gc.collect()
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
    assert other("late", tmp_path / "run").returncode == 0


@pytest.mark.ranks([1, 2])
def test_every_rank_learns_of_it_and_readers_do_not(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, {"model": nn.Linear(3, 3)})
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork() if fsdpc.rank() == 0 else -1
    if child == 0:  # another process that saves there, with a child of its own that outlives it
        keep = claim_folder(tmp_path)
        if os.fork() == 0:
            os.read(go_on[0], 1)
            os._exit(0)
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        del keep
        os._exit(0)
    if child > 0:
        os.read(ready[0], 1)
    fsdpc.barrier()
    with pytest.raises(BlockingIOError, match=TAKEN):
        CheckpointManager(tmp_path, every_seconds=5.0)
    assert CheckpointManager(tmp_path).restore({"model": nn.Linear(3, 3)}) == 1
    if child > 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    CheckpointManager(tmp_path, every_seconds=5.0)
    os.write(go_on[1], b"x")


@pytest.mark.ranks(1)
def test_a_forked_child_neither_has_the_claim_nor_ends_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=1)
    child = os.fork()
    if child == 0:
        del manager
        gc.collect()
        try:
            claim_folder(tmp_path)
        except BlockingIOError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert os.listdir(tmp_path) == [".lock"]
    assert other("manager", tmp_path).returncode == 1


@pytest.mark.ranks(1)
def test_a_claim_removes_what_killed_saves_left_but_no_save_under_way(tmp_path: Path) -> None:
    (tmp_path / ".step-00000030.saving").mkdir()
    (tmp_path / ".step-00000040.removing").mkdir()
    (tmp_path / ".step-00000050.lock").touch()
    (tmp_path / ".step-mine.saving").mkdir()
    found = []

    def meanwhile(call: str, where: str) -> None:
        if call == "rename":
            found.append(other("manager", tmp_path).returncode)

    with hooked(meanwhile):
        checkpoint.save(tmp_path / "step-00000060", {"model": nn.Linear(3, 3)})
    assert found == [0]
    assert sorted(os.listdir(tmp_path)) == [".step-mine.saving", "step-00000060"]


@pytest.mark.ranks(1, init=False, timeout=300)
def test_overwrite_killed_at_every_call(tmp_path: Path) -> None:
    """The old checkpoint or the new one is there, whole, and the next save finds room."""

    def save(rank: int, k: int) -> int:
        fsdpc.init()
        folder, left = tmp_path / str(k), k
        checkpoint.save(folder, {"model": llama(seed=1)})

        def kill(call: str, where: str) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                die()

        with hooked(kill):
            checkpoint.save(folder, {"model": llama(seed=2)}, overwrite=True)
        return k - left

    def look(rank: int, k: int) -> list[bool]:
        fsdpc.init()
        folder, model = tmp_path / str(k), llama(seed=3)
        checkpoint.load(folder, {"model": model})
        found = [values(model) == values(llama(seed=seed)) for seed in (1, 2)]
        checkpoint.save(folder, {"model": model}, overwrite=True)
        return found

    (calls,) = run(lambda rank: save(rank, 999), 1)
    seen = set()
    for k in range(calls):
        run(lambda rank, k=k: save(rank, k), 1)
        (found,) = run(lambda rank, k=k: look(rank, k), 1)
        assert sum(found) == 1, k
        seen.add(found[0])
        assert not list(tmp_path.glob(".*")), k
    assert seen == {True, False}


@pytest.mark.ranks(1)
def test_overwrite_replaces_checkpoints_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError, match="is no checkpoint, so it is not written over"):
            checkpoint.save(tmp_path / name, {"model": nn.Linear(3, 3)}, overwrite=True)
    with pytest.raises(OSError, match="there already"):
        checkpoint.save(tmp_path / "mine", {"model": nn.Linear(3, 3)})
    with pytest.raises(FileExistsError):
        CheckpointManager(tmp_path / "file", every_steps=2)


@pytest.mark.ranks(1, init=False)
def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Under another name, beside hidden files of other programs and a save that is under way."""

    def save(name: str, hook: Any = None) -> None:
        fsdpc.init()
        with hooked(hook):
            checkpoint.save(tmp_path / name, {"model": nn.Linear(3, 3)})

    run(lambda rank: save("step-3", lambda call, _: die() if call == "rename" else None), 1)
    assert sorted(os.listdir(tmp_path)) == [".step-3.lock", ".step-3.saving"]
    (tmp_path / ".app.lock").write_text("1234")
    (tmp_path / ".app.saving").mkdir()
    seen: list[list[str]] = []

    def meanwhile(call: str, where: str) -> None:
        if call == "rename":
            assert other("save", tmp_path / "step-5").returncode == 0
            seen.append(sorted(os.listdir(tmp_path)))

    def look(rank: int) -> list[list[str]]:
        save("step-4", meanwhile)
        return [*seen, sorted(os.listdir(tmp_path))]

    (found,) = run(look, 1)
    others = [".app.lock", ".app.saving"]
    assert found[0] == [*others, ".step-4.lock", ".step-4.saving", "step-5"]
    assert found[1] == [*others, "step-4", "step-5"]


def test_a_claimed_folder_is_reported_once(tmp_path: Path) -> None:
    """Before ranks start, by the command that would start them."""
    own = claim_folder(tmp_path)
    command = [sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--steps", "1"]
    done = subprocess.run([*command, "--checkpoint", str(tmp_path)], capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("belongs to another run: process") == 1, done.stderr
    own.release()
