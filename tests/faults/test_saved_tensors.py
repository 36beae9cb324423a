"""Saved tensors on disks that fail, and ranks that die: named, and nothing is left."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

import fsdpc
from tests.dist.test_saved_tensors import batch, build, policy_of

from .common import die, full_bytes, raised, run
from .test_leaks import descriptors, threads
from .test_offload import limit_files

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks


def train(model: Any) -> None:
    model(batch(0)).backward()


def corrupt(folder: Path) -> None:
    """Flip a bit of each file of this rank."""
    for number, link in descriptors().items():
        if link.startswith(str(folder)):
            fd = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
            for byte in os.pread(fd, 1, 0):
                os.pwrite(fd, bytes([byte ^ 4]), 0)
            os.close(fd)


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("fault", ["full", "short", "bit"])
def test_a_disk_that_fails_is_named(fault: str, disk: Path) -> None:
    """On every rank, and again at each later step."""

    def rank_of(rank: int) -> list[str]:
        fsdpc.init()
        model = build(policy_of(disk))
        with fsdpc.no_grad():
            model(batch(0))  # the shared memory, which the limit is not for
        if fault == "short":
            train(model)

        def spoil(module: Any, args: Any, y: Any) -> None:
            if rank == 1:
                corrupt(disk)  # what the first block saved was written before the third began

        if fault == "bit":
            model.layers[3].register_forward_hook(spoil)
        elif rank == 1:
            limit_files(4096)
        kinds = OSError, fsdpc.PeerError
        return [raised(lambda: train(model), *kinds)[0] for _ in range(2)]

    said = run(rank_of, 2)
    text = {
        "full": "cannot reserve",
        "short": "rank 1, writing saved tensors of unit 'layers.",
        "bit": "rank 1, reading saved tensors of unit 'layers.0': byte 0 of array 0",
    }[fault]
    assert text in said[1][0] and f"{disk}/(offloaded, rank 1)" in said[1][0]
    assert "rank 1" in said[0][0]
    assert said[1][1] and "rank 1" in said[0][1]


@pytest.mark.ranks(1, init=False)
def test_a_rank_that_is_killed_leaves_no_file(disk: Path) -> None:
    def rank_of(rank: int) -> str:
        fsdpc.init()
        model = build(policy_of(disk))
        train(model)

        def in_backward(gradient: Any) -> None:
            if rank == 1:
                assert os.listdir(disk) == []
                die()

        model.layers[2].register_forward_hook(lambda m, a, y: y.register_hook(in_backward) and None)
        return raised(lambda: train(model), fsdpc.PeerError)[0]

    said = run(rank_of, 2)
    assert said[1] is None and "rank 1" in said[0]
    assert os.listdir(disk) == []


@pytest.mark.ranks(2)
def test_models_come_and_go(disk: Path) -> None:
    """And leave no descriptor, thread or byte, also if a forward fails between two units."""

    def once() -> None:
        model = build(policy_of(disk))
        train(model)

        def stop(*_: Any) -> None:
            raise KeyError

        for hook in (model.layers[2].register_forward_hook, model.layers[4].register_forward_hook):
            handle = hook(stop)
            with pytest.raises(KeyError):
                train(model)
            handle.remove()
        before = full_bytes(model)
        train(model)
        assert full_bytes(model) == before
        del model
        gc.collect()

    once()
    seen = descriptors(), threads(), fsdpc.memory_stats()["disk_file_bytes"]
    for _ in range(5):
        once()
    assert (descriptors(), threads(), fsdpc.memory_stats()["disk_file_bytes"]) == seen


@pytest.mark.ranks(1)
def test_a_child_that_forks_in_between_harms_nothing(disk: Path) -> None:
    model = build(policy_of(disk))
    loss = model(batch(0))
    child = os.fork()
    if child == 0:
        try:
            loss.backward()
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    loss.backward()
    del loss
    child = os.fork()
    if child == 0:
        del model
        gc.collect()
        os._exit(7)  # the file's threads are the parent's
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
