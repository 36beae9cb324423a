"""What user code does beside the engine: forks, threads, generators, Ctrl-C, exit handlers.

Nothing may hang, and whoever is in the wrong is told so by name.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import MismatchError, PeerError, nn
from fsdpc.launching.launcher import LaunchError, launch
from tests.offload import on_disk

from .common import (
    SOON_S,
    batch,
    build,
    full_bytes,
    raised,
    run,
    step,
    wait_asleep,
    wait_file,
    wait_gone,
)
from .test_leaks import PACKAGE_PARENT, ranks_of

ANY = (RuntimeError, PeerError, MismatchError, TimeoutError)


def trained(steps: int = 4, between: Callable[[int, Any, Any], None] | None = None) -> list[bytes]:
    """Parameters after a few steps; ``between`` may do anything before each."""
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    for i in range(steps):
        if between:
            between(i, model, optimizer)
        step(model, optimizer, seed=i)
    return full_bytes(model)


# ---- forks


def in_a_fork(fn: Callable[[], object]) -> str:
    """What a forked child got from a call: the error's text, or "returned"."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fn()
            os.write(write, b"returned")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.ranks(2, timeout=120)
def test_a_fork_after_init_is_refused_and_the_rank_goes_on() -> None:
    texts: dict[str, str] = {}

    def fork(i: int, model: nn.Module, optimizer: fsdpc.optim.AdamW) -> None:
        if i == 2:
            texts["barrier"] = in_a_fork(fsdpc.barrier)
            texts["forward"] = in_a_fork(lambda: model(batch()))
            texts["step"] = in_a_fork(optimizer.step)
            texts["full_tensor"] = in_a_fork(lambda: fsdpc.full_tensor(model.head.weight))
            texts["shutdown"] = in_a_fork(fsdpc.shutdown)

    forked = trained(between=fork)
    assert texts.pop("shutdown") == "returned"  # an exit handler of the child may well call it
    for call, text in texts.items():
        assert f"fork of rank {fsdpc.rank()}" in text, (call, text)
    assert forked == trained()


@pytest.mark.ranks(2, timeout=120)
def test_a_worker_forked_in_the_middle_of_a_step_disturbs_nobody() -> None:
    """As a data loader's: it computes with NumPy, sends its result and exits the ordinary way."""
    import multiprocessing

    context = multiprocessing.get_context("fork")

    def work(results: Any) -> None:
        results.send(float(np.ones(3).sum()))

    def between(i: int, model: nn.Module, optimizer: object) -> None:
        if i == 2:
            loss = model(batch(7))
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=work, args=(sender,))
            worker.start()
            loss.backward()
            assert receiver.recv() == 3.0
            worker.join(10)
            assert worker.exitcode == 0
            optimizer.zero_grad()

    assert trained(between=between) == trained()


@pytest.mark.ranks(2, timeout=120)
def test_a_forked_child_that_exits_through_its_handlers_leaves_the_rank_alone() -> None:
    def between(i: int, model: object, optimizer: object) -> None:
        if i == 2:
            pid = os.fork()
            if pid == 0:
                fsdpc.shutdown()  # what the exit handler of `import fsdpc` does
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0

    assert trained(between=between) == trained()


# ---- threads, generators, exceptions


@pytest.mark.ranks([1, 2], timeout=120)
def test_two_threads_in_backward_end() -> None:
    """One model per rank is one thread's: the second is refused, or comes after the first."""
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    losses = [model(batch(i)) for i in range(2)]
    errors: list[BaseException] = []

    def backward(loss: Any) -> None:
        try:
            loss.backward()
        except ANY as error:
            errors.append(error)

    threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for error in errors:
        assert "thread" in str(error) or "rank" in str(error) or "backward" in str(error), error


@pytest.mark.ranks([1, 2], timeout=120)
def test_a_generator_that_abandons_a_step() -> None:
    def steps(model: nn.Module) -> Iterator[None]:
        for i in range(9):
            loss = model(batch(i))
            yield
            loss.backward()
            yield

    def between(i: int, model: nn.Module, optimizer: fsdpc.optim.AdamW) -> None:
        if i == 2:
            abandoned = steps(model)
            for _ in range(3):  # a whole step, and a forward whose backward never comes
                next(abandoned)
            optimizer.zero_grad()

    assert trained(between=between) == trained()


def on_rank_0_only(call: str) -> None:
    """A collective call under ``if rank == 0``, in a loop that all run."""
    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    step(model, optimizer)
    if fsdpc.rank() == 0:
        {
            "full_tensor": lambda: fsdpc.full_tensor(model.head.weight),
            "all_reduce": lambda: fsdpc.all_reduce(1.0),
            "forward": lambda: model(batch()),
            "clip": lambda: fsdpc.clip_grad_norm_(model, 1.0),
            "optimizer": optimizer.step,
            "unshard": model.unshard,
            "hold": lambda: model.hold().__enter__(),
            "barrier": fsdpc.barrier,
        }[call]()
    step(model, optimizer)
    fsdpc.barrier()


CALLS = ["full_tensor", "all_reduce", "forward", "clip", "optimizer", "unshard", "hold", "barrier"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(2, timeout=120)
def test_a_collective_call_under_if_rank_0(call: str) -> None:
    began = time.monotonic()
    text, _ = raised(lambda: on_rank_0_only(call), MismatchError, PeerError)
    assert "rank 0" in text and "rank 1" in text
    assert time.monotonic() - began < SOON_S + 1


@pytest.mark.ranks(1, init=False)
def test_a_backward_on_rank_0_as_the_last_thing_of_a_program() -> None:
    """Nothing comes on the other rank that could differ: it has left."""

    def rank_of(rank: int) -> str:
        fsdpc.init()
        model = build()
        step(model, fsdpc.optim.AdamW(model.parameters()))
        loss = model(batch())
        if rank == 0:
            return raised(loss.backward, PeerError)[0]
        fsdpc.shutdown()
        return ""

    assert "rank 1" in run(rank_of, 2)[0]


# ---- Ctrl-C


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize(
    "moment", ["forward", "in forward", "backward", "clip", "optimizer", "barrier"]
)
@pytest.mark.ranks(1, init=False)
def test_ctrl_c_while_a_rank_waits(moment: str, to_all: bool, tmp_path: Path, disk: Path) -> None:
    """It ends the wait within 0.2 s; the program ends, and so do the peers.

    Inside forward a rank waits where a step goes on: for its peers to have stepped a unit.
    """

    def body() -> None:
        rank = int(os.environ["RANK"])
        fsdpc.init()
        late = moment == "in forward"
        model = build(offload_policy=on_disk(disk, "masters", "optimizer") if late else None)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        step(model, optimizer)

        def say(place: str) -> None:
            if place != moment:
                return
            (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
            if rank == 0:
                pid = int(wait_file(tmp_path / "pid1"))
                wait_asleep(pid)
                (tmp_path / "struck").write_text(repr(time.monotonic()))
                os.kill(pid, signal.SIGINT)
                if to_all:
                    os.kill(os.getpid(), signal.SIGINT)

        try:
            for _ in range(3):
                step(model, optimizer, say)
        except KeyboardInterrupt:
            seconds = time.monotonic() - float((tmp_path / "struck").read_text())
            (tmp_path / f"seconds{rank}").write_text(repr(seconds))
            raise

    with pytest.raises(LaunchError) as caught:
        launch(body, 2, timeout=120)
    assert not caught.value.timed_out
    assert "KeyboardInterrupt" in caught.value.tracebacks[1]
    assert float((tmp_path / "seconds1").read_text()) < 0.5
    other = caught.value.tracebacks[0]
    assert "KeyboardInterrupt" in other if to_all else "rank 1" in other


def interrupt_at_random(seed: int, tmp_path: Path, disk: Path) -> None:
    """Ctrl-C for one rank, or all, at a random moment of a run that would go on for ever."""
    rng = random.Random(seed)
    ranks, everybody, after = rng.choice([2, 3]), rng.random() < 0.5, rng.uniform(0, 0.25)

    def body() -> None:
        rank = int(os.environ["RANK"])
        fsdpc.init()
        policy = on_disk(disk, "masters", "optimizer") if seed % 2 else None
        model = build(offload_policy=policy)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
        if rank == 0:
            pids = [int(wait_file(tmp_path / f"pid{r}")) for r in range(ranks)]

            def interrupt() -> None:
                time.sleep(after)  # the subject of the test: any moment
                for pid in pids if everybody else pids[1:2]:
                    os.kill(pid, signal.SIGINT)

            threading.Thread(target=interrupt, daemon=True).start()
        while True:
            step(model, optimizer)

    with pytest.raises(LaunchError) as caught:
        launch(body, ranks, timeout=120)
    assert not caught.value.timed_out, caught.value
    texts = caught.value.tracebacks
    assert set(texts) == set(range(ranks))
    struck = range(ranks) if everybody else [1]
    # A rank that was struck may have been told of another's end first.
    assert any("KeyboardInterrupt" in texts[rank] for rank in struck), texts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.ranks(1, init=False)
def test_ctrl_c_at_any_time(seed: int, tmp_path: Path, disk: Path) -> None:
    interrupt_at_random(seed, tmp_path, disk)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
@pytest.mark.ranks(1, init=False)
def test_ctrl_c_at_many_times(seed: int, tmp_path: Path, disk: Path) -> None:
    interrupt_at_random(seed, tmp_path, disk)


# ---- exit handlers

PROGRAM = """
import atexit
import fsdpc
from tests.faults.common import batch, build, step

fsdpc.init()
model = build()
optimizer = fsdpc.optim.AdamW(model.parameters())
step(model, optimizer)

@atexit.register
def save():
    {handler}

if fsdpc.rank() == 1:
    raise ValueError("oops")
step(model, optimizer)
"""

HANDLERS = {
    "nothing": "pass",
    "full_tensor": "print(len([fsdpc.full_tensor(p) for p in model.parameters()]))",
    "barrier": "fsdpc.barrier()",
    "forward": "model(batch())",
    "step": "optimizer.step()",
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_an_exit_handler_after_an_exception(handler: str, tmp_path: Path) -> None:
    """It runs on the rank that raised while the others wait in a step: an error, not a hang."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(handler=HANDLERS[handler]))
    path = os.pathsep.join([PACKAGE_PARENT, str(Path(__file__).parents[2])])
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdpc", "run", "--ranks", "2", str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": path, "FSDPC_TIMEOUT_S": "30"},
    )  # fmt: skip
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "ValueError: oops" in out and "rank 1" in out
    assert time.monotonic() - began < 15, out
    assert all(wait_gone(pid) for pid in ranks_of(process.pid))
