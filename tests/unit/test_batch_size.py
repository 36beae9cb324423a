"""find_batch_size(): one rank's failure is everybody's, whatever the others wait in."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import fsdpc
from fsdpc.launching.launcher import LaunchError

pytestmark = pytest.mark.usefixtures("no_engine_threads")


def sharded_step(batch: int, limit: int, fail: str) -> None:
    """A step in whose forward rank 1 fails, while rank 0 goes on into collectives."""
    fsdpc.init()

    class Block(fsdpc.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = fsdpc.nn.Linear(8, 8)

        def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
            if fsdpc.rank() == 1 and batch > limit:
                if fail == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MemoryError(f"{batch} rows") if fail == "memory" else KeyError("other")
            return self.linear(x)

    model = fsdpc.nn.Sequential(*[Block() for _ in range(3)])
    for block in model:
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    model(fsdpc.tensor(np.ones((batch, 8), np.float32))).sum().backward()


@pytest.mark.parametrize(("fail", "limit"), [("memory", 11), ("kill", 2)])
def test_the_largest_that_fits_all_ranks(fail: str, limit: int) -> None:
    found = fsdpc.find_batch_size(
        lambda batch: sharded_step(batch, limit, fail), 2, limit=16, timeout=300
    )
    assert found == limit


def test_sizes_between_start_and_limit() -> None:
    def fits(largest: int) -> int:
        def step(batch: int) -> None:
            if batch > largest:
                raise MemoryError

        return fsdpc.find_batch_size(step, 1, start=3, limit=20)

    assert [fits(n) for n in (3, 13, 20, 99)] == [3, 13, 20, 20]
    with pytest.raises(MemoryError, match="a batch of 3 does not fit on 1 ranks"):
        fits(2)
    with pytest.raises(ValueError, match="start must be from 1 to the limit of 4"):
        fsdpc.find_batch_size(lambda batch: None, 1, start=5, limit=4)


def test_other_failures_are_no_answer() -> None:
    with pytest.raises(LaunchError, match="KeyError: 'other'"):
        fsdpc.find_batch_size(lambda batch: sharded_step(batch, 1, "other"), 2, timeout=300)
