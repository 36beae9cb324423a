"""Disks that are full, that forget, and ranks that die: an error on every rank, and no file."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from tests.offload import on_disk

from .common import batch, build, die, full_bytes, raised, run
from .test_leaks import descriptors, threads

pytestmark = pytest.mark.usefixtures("no_engine_threads")  # launch() forks

WIDTH = 96
BOTH = ("masters", "optimizer")


def train(model: Any, optimizer: Any, steps: int = 1) -> None:
    for k in range(steps):
        model(batch(k, WIDTH)).backward()
        finish(model, optimizer)


def finish(model: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def limit_files(size: int) -> None:
    """No file of this process may grow beyond that; what would is refused, as by a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def corrupt(folder: Path, offset: int = 0) -> None:
    """Flip a bit of this rank's file."""
    for number, link in descriptors().items():
        if link.startswith(str(folder)):
            fd = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
            byte = os.pread(fd, 1, offset)[0]
            os.pwrite(fd, bytes([byte ^ 4]), offset)
            os.close(fd)
            return
    raise AssertionError(f"no file is open in {folder}")


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("what", ["masters", "optimizer", "view"])
def test_a_bit_that_changed_is_named(what: str, disk: Path) -> None:
    """On every rank; a view of states that is written after a step, without asking anew, too."""

    def rank_of(rank: int) -> str:
        fsdpc.init()
        model = build(WIDTH, offload_policy=on_disk(disk, "optimizer" if what == "view" else what))
        optimizer = fsdpc.optim.AdamW(model.parameters())
        train(model, optimizer)
        view = optimizer.state_views(model.blocks[0].weight)["exp_avg"]
        train(model, optimizer)
        fsdpc.barrier()
        if rank == 1 and what == "view":
            view.numpy()[0, 0] += 1
        elif rank == 1:
            corrupt(disk)
        return raised(lambda: train(model, optimizer, 2), OSError, fsdpc.PeerError)[0]

    said = run(rank_of, 3)
    array = "master" if what == "masters" else "exp_avg"
    for text in said:
        assert f"chunk 0 of {array} of unit 'blocks.0'" in text
        assert "rank 1" in text and f"{disk}/(offloaded, rank 1)" in text and "CRC-32C" in text


def damage(folder: Path, offset: int) -> None:
    """Flip a bit of the params that lie in a folder, by the mapping that this rank writes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line and " rw-s " in line:
            begin = int(line.split("-")[0], 16)
            ctypes.c_uint8.from_address(begin + offset).value ^= 4
            return
    raise AssertionError(f"nothing in {folder} is mapped")


@pytest.mark.ranks(1, init=False)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_params_that_changed_are_not_used(strategy: str, world: int, disk: Path) -> None:
    """The rank whose slices they are names them, whoever wrote there, and every rank fails."""

    def rank_of(rank: int) -> str:
        fsdpc.init()
        model = build(WIDTH, offload_policy=on_disk(disk, "params"), strategy=strategy)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        train(model, optimizer, 2)
        fsdpc.barrier()
        if rank == world - 1:
            damage(disk, 64)
        fsdpc.barrier()
        return raised(lambda: train(model, optimizer), OSError, fsdpc.PeerError)[0]

    for text in run(rank_of, world):
        assert "rank 0's params of unit 'Net'" in text and "CRC-32C" in text, text
        assert f"{disk}/(offloaded, rank 0)" in text


#: What reads gradients, each after a backward.
READERS: dict[str, Callable[[Any, Any], object]] = {
    "step": lambda model, optimizer: [optimizer.step(), model(batch(1, WIDTH))],
    "clip": lambda model, optimizer: fsdpc.clip_grad_norm_(model.parameters(), 1.0),
    "grad": lambda model, optimizer: model.blocks[0].weight.grad,
    "full_grad": lambda model, optimizer: fsdpc.full_grad(model.blocks[0].weight),
    "the next backward": lambda model, optimizer: model(batch(1, WIDTH)).backward(),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", list(READERS))
def test_gradients_that_changed_are_not_used(how: str, disk: Path) -> None:
    """What reductions wrote has a checksum, until somebody holds the gradients."""
    model = build(WIDTH, offload_policy=on_disk(disk, "gradients"))
    optimizer = fsdpc.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    model(batch(0, WIDTH)).backward()
    corrupt(disk)
    with pytest.raises(OSError, match=r"chunk 0 of grad of unit 'blocks\.0'.*CRC-32C"):
        READERS[how](model, optimizer)


@pytest.mark.ranks(1)
def test_gradients_may_be_written(disk: Path) -> None:
    """Through tensors that live on, and that went away; what is scaled by clipping too."""
    model = build(WIDTH, offload_policy=on_disk(disk, "gradients"))
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for held in (True, False):
        model(batch(0, WIDTH)).backward()
        grad = model.blocks[0].weight.grad
        grad.numpy()[...] += 1
        values = grad.numpy().copy()
        if not held:
            del grad
        gc.collect()
        fsdpc.clip_grad_norm_(model.parameters(), 0.5)
        assert np.all(model.blocks[0].weight.grad.numpy() < values.max())
        model(batch(1, WIDTH)).backward()
        finish(model, optimizer)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", ["full_tensor", "local", "state", "state_views", "state_dict"])
def test_a_bit_that_changed_is_not_handed_out(how: str, disk: Path) -> None:
    """Values and states are compared when somebody asks for them, too."""
    model = build(WIDTH, offload_policy=on_disk(disk, *BOTH))
    optimizer = fsdpc.optim.AdamW(model.named_parameters())
    train(model, optimizer, 2)
    fsdpc.full_tensor(model.head.weight)  # the step has ended
    weight = model.blocks[0].weight
    reads: dict[str, Callable[[], object]] = {
        "full_tensor": lambda: fsdpc.full_tensor(weight),
        "local": lambda: weight.local,
        "state": lambda: optimizer.state(weight),
        "state_views": lambda: optimizer.state_views(weight),
        "state_dict": optimizer.state_dict,
    }
    states = fsdpc.memory_plan(model).file // 3  # behind as many bytes of masters
    corrupt(disk, states if how.startswith("state") else 0)
    with pytest.raises(OSError, match=r"chunk 0 of .* of unit 'blocks.0'.*CRC-32C"):
        reads[how]()


@pytest.mark.ranks(1, init=False)
def test_a_disk_that_cannot_hold_a_unit(disk: Path) -> None:
    def rank_of(rank: int) -> str:
        fsdpc.init()
        if rank == 1:
            limit_files(4096)
        return raised(
            lambda: build(WIDTH, offload_policy=on_disk(disk, "masters")), OSError, fsdpc.PeerError
        )[0]

    said = run(rank_of, 2)
    assert "cannot reserve" in said[1] and f"{disk}/(offloaded, rank 1)" in said[1]
    assert "rank 1" in said[0]


@pytest.mark.ranks(1, init=False)
def test_a_disk_that_cannot_hold_states(disk: Path) -> None:
    """They are made by the first step."""

    def rank_of(rank: int) -> str:
        fsdpc.init()
        model = build(WIDTH, offload_policy=on_disk(disk, "optimizer"))
        optimizer = fsdpc.optim.AdamW(model.parameters())
        model(batch(0, WIDTH)).backward()
        fsdpc.barrier()
        if rank == 1:
            limit_files(4096)
        return raised(lambda: finish(model, optimizer), OSError, fsdpc.PeerError)[0]

    said = run(rank_of, 2)
    assert "cannot reserve" in said[1] and f"{disk}/(offloaded, rank 1)" in said[1]
    assert "rank 1" in said[0]


@pytest.mark.ranks(1, init=False)
def test_a_write_that_fails_ends_the_step_everywhere(disk: Path) -> None:
    def rank_of(rank: int) -> list[str]:
        fsdpc.init()
        model = build(WIDTH, offload_policy=on_disk(disk, *BOTH))
        optimizer = fsdpc.optim.AdamW(model.parameters())
        train(model, optimizer)
        fsdpc.barrier()
        if rank == 1:
            limit_files(8192)
        kinds = OSError, fsdpc.PeerError
        return [raised(lambda: train(model, optimizer, 2), *kinds)[0] for _ in range(2)]

    said = run(rank_of, 2)
    for first, again in said:
        assert "rank 1, writing " in first and "File too large" in first
        assert f"{disk}/(offloaded, rank 1)" in first and f"{disk}" in again


@pytest.mark.ranks(1, init=False)
def test_a_rank_that_is_killed_leaves_no_file(disk: Path) -> None:
    """In the middle of a step, while others wait for it."""

    def rank_of(rank: int) -> str:
        fsdpc.init()
        model = build(WIDTH, offload_policy=on_disk(disk, "params", "gradients", *BOTH))
        optimizer = fsdpc.optim.AdamW(model.parameters())
        train(model, optimizer, 2)

        def say(where: str) -> None:
            if rank == 1 and where == "in backward":
                assert os.listdir(disk) == []
                die()

        model.say = say
        return raised(lambda: train(model, optimizer, 2), fsdpc.PeerError)[0]

    said = run(rank_of, 2)
    assert said[1] is None and "rank 1" in said[0]
    assert os.listdir(disk) == []


@pytest.mark.ranks(2)
def test_models_come_and_go(disk: Path) -> None:
    """And leave no descriptor, thread, mapping or byte of a file; nor do many steps."""

    def once(steps: int = 1) -> None:
        policy = fsdpc.OffloadPolicy(
            params="disk", gradients="disk", masters="disk", optimizer="disk", path=disk
        )
        model = build(32, 1, offload_policy=policy)
        optimizer = fsdpc.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(batch(0, 32)).backward()
            finish(model, optimizer)

    def held() -> tuple[int, int, int]:
        gc.collect()
        fsdpc.barrier()
        assert fsdpc.memory_stats()["disk_file_bytes"] == 0
        mappings = Path("/proc/self/maps").read_text()
        assert str(disk) not in mappings
        return len(descriptors()), threads(), fsdpc.memory_stats()["total_bytes"]

    once()
    before = held()
    for _ in range(60):
        once()
    once(100)
    assert held() == before
    assert os.listdir(disk) == []


def resident() -> int:
    """Bytes of this process in memory, but for pages of files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])


@pytest.mark.ranks(1)
def test_two_thousand_steps_leak_nothing(disk: Path) -> None:
    """Of bytes in files, descriptors, threads or memory, with everything on the disk."""
    policy = on_disk(disk, "params", "gradients", *BOTH)
    model = build(32, 1, offload_policy=policy)
    optimizer = fsdpc.optim.AdamW(model.parameters())

    def held() -> list[int]:
        gc.collect()
        stats = fsdpc.memory_stats()
        return [stats["disk_file_bytes"], stats["total_bytes"], len(descriptors()), threads()]

    def go(steps: int) -> None:
        for k in range(steps):
            model(batch(k, 32)).backward()
            finish(model, optimizer)

    go(200)
    before, memory = held(), resident()
    go(2000)
    assert held() == before
    assert resident() - memory < 2**20  # half a kilobyte a step would show
    assert optimizer.step_count(model.head.weight) == 2200


@pytest.mark.ranks(1)
def test_a_child_that_ends_harms_nothing(disk: Path) -> None:
    """It drops the model, and all of Python's objects, and leaves the parent's file alone."""
    found = []
    for forks in (False, True):
        model = build(WIDTH, offload_policy=on_disk(disk, "gradients", *BOTH))
        optimizer = fsdpc.optim.AdamW(model.parameters())
        for _ in range(3):
            train(model, optimizer)
            for clean in (False, True) if forks else ():
                pid = os.fork()
                if pid == 0:
                    code = 9  # the parent's step goes on, and nothing was said
                    try:
                        fsdpc.full_tensor(model.head.weight)
                    except RuntimeError as error:
                        code = 7 if "a forked child" in str(error) else 8
                    if clean:
                        del model, optimizer
                        gc.collect()
                    os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        found.append(full_bytes(model))
    assert found[0] == found[1]
    assert np.frombuffer(found[0][0], np.float32).any()
