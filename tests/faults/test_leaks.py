"""Nothing is left: descriptors, mappings, threads, processes, names in /dev/shm."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdpc

from .common import SOON_S, batch, build, die, raised, run, step, wait_file, wait_gone

PACKAGE_PARENT = str(Path(fsdpc.__file__).parents[1])


def descriptors() -> dict[int, str]:
    """What every open descriptor of this process refers to, but the launcher's for init()."""
    seen = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            seen[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass  # the folder itself
    seen.pop(int(os.environ.get("FSDPC_RANK_SOCKET", -1)), None)
    return seen


def memfd_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


# Names in /dev/shm that MPI leaves where its launcher killed the ranks.
OF_MPI = ("mpich_sh", "vader_segment", "ucx_shm")


def shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OF_MPI)}


def shm_left(names: set[str], within: float = 20.0) -> set[str]:
    """Names that are new and stay; those of tests that run at the same time go again."""
    left, deadline = shm_names() - names, time.monotonic() + within
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= shm_names()
    return left


@pytest.mark.ranks([1, 2, 3], init=False)
def test_shutdown_gives_everything_back() -> None:
    names = shm_names()
    fsdpc.tensor([1.0]) + 1  # the runtime: it stays with the process
    before, threads_before = descriptors(), threads()
    for _ in range(3):
        fsdpc.init()
        model = build()
        optimizer = fsdpc.optim.AdamW(model.parameters())
        step(model, optimizer)
        fsdpc.barrier()
        assert shm_left(names) == set()
        del model, optimizer
        gc.collect()
        fsdpc.shutdown()
        assert descriptors() == before
        assert memfd_mappings() == []
        assert threads() == threads_before


@pytest.mark.ranks(2, init=False)
def test_a_model_that_outlives_shutdown_goes_with_its_last_reference() -> None:
    fsdpc.tensor([1.0]) + 1
    before = descriptors()
    fsdpc.init()
    model = build()
    loss = model(batch())
    fsdpc.barrier()
    fsdpc.shutdown()
    with pytest.raises(RuntimeError, match=r"shutdown\(\) was called"):
        model(batch())
    del model
    with pytest.raises(RuntimeError, match="shutdown"):
        loss.backward()  # the graph keeps the unit alive, and says why it cannot run
    del loss
    gc.collect()
    assert descriptors() == before
    assert memfd_mappings() == []


@pytest.mark.ranks(1, init=False)
def test_who_waits_for_a_rank_that_shut_down_is_told(tmp_path: Path) -> None:
    """Although the model, which lives on there, keeps the memory."""

    def rank_of(rank: int) -> str:
        fsdpc.init()
        model = build()
        model(batch())
        fsdpc.barrier()
        if rank == 0:
            fsdpc.shutdown()
            wait_file(tmp_path / "told")
            return ""
        began = time.monotonic()
        text, at = raised(fsdpc.barrier, fsdpc.PeerError)
        (tmp_path / "told").write_text("yes")
        assert at - began < SOON_S
        return text

    assert "rank 0" in run(rank_of, 2)[1]


@pytest.mark.ranks(2, init=False)
def test_nothing_listens_once_all_have_met() -> None:
    fsdpc.init()
    own = {link[8:-1] for link in descriptors().values() if link.startswith("socket:[")}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in own:
            assert int(fields[3], 16) & 0x10000 == 0, f"a listening socket: {line}"
    fsdpc.barrier()


@pytest.mark.ranks(1, init=False)
def test_a_failed_init_gives_everything_back(tmp_path: Path) -> None:
    def rank_of(rank: int) -> bool:
        if rank:
            wait_file(tmp_path / "done")
            return True
        fsdpc.tensor([1.0]) + 1
        before = descriptors()
        with pytest.raises(TimeoutError, match="rank 1"):
            fsdpc.init()
        (tmp_path / "done").write_text("yes")
        return descriptors() == before and not fsdpc.is_initialized()

    assert run(rank_of, 2, FSDPC_TIMEOUT_S="0.3") == [True, True]


@pytest.mark.ranks(1, init=False)
def test_survivors_of_a_death_give_everything_back() -> None:
    def rank_of(rank: int) -> bool:
        fsdpc.tensor([1.0]) + 1
        before = descriptors()
        fsdpc.init()
        model = build()
        optimizer = fsdpc.optim.AdamW(model.parameters())
        say = die if rank == 1 else lambda: None
        with pytest.raises(fsdpc.PeerError):
            step(model, optimizer, lambda where: say() if where == "in backward" else None)
        del model, optimizer
        gc.collect()
        fsdpc.shutdown()
        return descriptors() == before and memfd_mappings() == []

    names = shm_names()
    assert run(rank_of, 3) == [True, None, True]
    assert shm_left(names) == set()


@pytest.fixture
def training() -> Iterator[subprocess.Popen[str]]:
    """``fsdpc train --ranks 2``, after its first step, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdpc", "train", "--ranks", "2", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT},
    )
    try:
        while "step 1/" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(launcher: int) -> list[int]:
    mark = f"FSDPC_LAUNCHER_PID={launcher}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_takes_its_ranks_along(
    training: subprocess.Popen[str], signum: signal.Signals
) -> None:
    names = shm_names()
    ranks = ranks_of(training.pid)
    assert len(ranks) == 2
    training.send_signal(signum)
    out, err = training.communicate(timeout=120)
    assert all(wait_gone(pid) for pid in ranks)
    assert shm_left(names) == set()
    if signum == signal.SIGKILL:
        assert training.returncode == -signum
    else:
        assert training.returncode == 128 + signum
        assert f"ended by {signum.name}" in err


@pytest.mark.parametrize("victim", [0, 1])
def test_train_says_which_rank_was_killed(training: subprocess.Popen[str], victim: int) -> None:
    pids = sorted(ranks_of(training.pid))
    by_rank = {}
    for pid in pids:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        by_rank[next(int(v[5:]) for v in environment if v.startswith(b"RANK="))] = pid
    os.kill(by_rank[victim], signal.SIGKILL)
    out, err = training.communicate(timeout=120)
    assert training.returncode == 128 + signal.SIGKILL
    assert f"fsdpc: rank {victim} failed first" in err
    assert "PeerError" in out and f"rank {victim}" in out
    assert all(wait_gone(pid) for pid in pids)


INTERRUPTED = """
import fsdpc, sys, time
from fsdpc.launching.launcher import launch

def body():
    fsdpc.init()
    print("ready", flush=True)
    if fsdpc.rank() == {waits}:
        fsdpc.barrier()
    while True:
        time.sleep(0.01)

try:
    launch(body, 3)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("waits", [0, 2])
def test_ctrl_c_ends_launch(waits: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(waits=waits)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGE_PARENT},
    )
    for _ in range(3):
        assert process.stdout.readline().endswith("ready\n")
    ranks = [pid for pid in ranks_of(process.pid) if pid != process.pid]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert out.endswith("interrupted\n") and process.returncode == 0
    assert all(wait_gone(pid) for pid in ranks)
