"""Bad writes to unsharded parameters, and reads after a reshard: one line names them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import pytest

import fsdpc
from fsdpc.launching.launcher import LaunchError, launch

from .common import batch, build

X86 = platform.machine() == "x86_64"  # elsewhere the line does not tell reads from writes


def address_of(parameter: Any) -> int:
    """Where its full is; only while it may be read."""
    return parameter.detach().numpy().ctypes.data


def write_to_full() -> None:
    model = build()
    model.unshard()
    address = address_of(model.head.weight)
    if fsdpc.rank() == 1:
        ctypes.memset(address + 4, 0, 4)


def read_after_reshard() -> None:
    model = build(reshard_after_forward=True)
    block = model.blocks[1]
    model(batch())
    block.unshard()
    address = address_of(block.bias)
    block.reshard()
    if fsdpc.rank() == 1:
        ctypes.string_at(address, 4)


def lines_of_death(deed: Callable[[], None], ranks: int, **environment: str) -> list[str]:
    """Rank 1's last output (rank 0's in a world of one), it having died by SIGSEGV."""

    def body() -> None:
        fsdpc.init()
        deed()
        fsdpc.barrier()

    with pytest.raises(LaunchError) as caught:
        launch(body, ranks, timeout=120, env=environment)
    last = ranks - 1
    assert caught.value.rank == last and not caught.value.timed_out
    text = caught.value.tracebacks[last]
    assert text.startswith("killed by SIGSEGV"), text
    return text.splitlines()


@pytest.mark.parametrize("no_alias", ["0", "1"])
@pytest.mark.ranks(1, init=False)
def test_a_write_to_a_full_is_named(no_alias: str) -> None:
    lines = lines_of_death(write_to_full, 2, FSDPC_NO_ALIAS=no_alias)
    named = [line for line in lines if line.startswith("fsdpc:")]
    assert len(named) == 1, lines
    assert named[0].startswith("fsdpc: rank 1: something ")
    assert "parameter 'head.weight' of unit 'Net'" in named[0]
    assert not X86 or "wrote to" in named[0]
    # Python's own handler comes after it, with the place in the user's code.
    assert any("in write_to_full" in line for line in lines[lines.index(named[0]) :]), lines


@pytest.mark.ranks(1, init=False)
def test_a_read_after_reshard_is_named_in_no_alias_mode() -> None:
    lines = lines_of_death(read_after_reshard, 2, FSDPC_NO_ALIAS="1")
    named = [line for line in lines if line.startswith("fsdpc:")]
    assert len(named) == 1, lines
    assert named[0].startswith("fsdpc: rank 1: something ")
    assert "parameter 'bias' of unit 'blocks.1'" in named[0]
    assert not X86 or "read parameter" in named[0]


@pytest.mark.ranks(2)
def test_reading_after_reshard_survives_where_memory_is_shared() -> None:
    read_after_reshard()
