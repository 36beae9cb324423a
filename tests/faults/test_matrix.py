"""A fault on one rank in every phase of a run, and what the others, the launcher and the next do.

conftest.py prints what was measured here as a table; docs/reliability.md has its ranges.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .common import SOON_S
from .matrix import DEADLINE_S, PHASES, WAITS, Cell, Found, happen, quiet_launch
from .test_leaks import descriptors, memfd_mappings, shm_left, shm_names

# Nobody calls the engine any more, or what was waited for was done before the fault.
UNNOTICED = {("shutdown", False), ("barrier", True)}


def cells(fault: str, ranks: int) -> list[Cell]:
    """All places of a fault; an exception can only be raised by the rank's own code."""
    places = [(phase, False) for phase in PHASES]
    places += [(phase, True) for phase in WAITS if fault != "exception"]
    if fault == "stop":  # then all others end well, and the launcher waits for the stopped one
        places = [place for place in places if place not in UNNOTICED]
    return [Cell(fault, phase, waits, ranks) for phase, waits in places]


def quick(cell: Cell) -> bool:
    """Whether it is run every time: two ranks, and stops, which wait, at three places."""
    stops = {("in forward", False), ("backward", True), ("optimizer", False)}
    return cell.ranks == 2 and (cell.fault != "stop" or (cell.phase, cell.waits) in stops)


ALL = [cell for fault in ("kill", "exception", "stop") for n in (2, 4) for cell in cells(fault, n)]


def marked(all_cells: list[Cell]) -> list[object]:
    """The slow ones for `make soak` alone."""
    return [
        pytest.param(cell, id=str(cell), marks=[] if quick(cell) else [pytest.mark.soak])
        for cell in all_cells
    ]


def check_survivors(cell: Cell, found: Found) -> None:
    """Every one has raised in time, and somebody says where."""
    if (cell.phase, cell.waits) in UNNOTICED:
        assert all(s.kind == "" for s in found.survivors)
        return
    limit = DEADLINE_S + SOON_S if cell.fault == "stop" else SOON_S
    for survivor in found.survivors:
        assert survivor.kind in ("PeerError", "TimeoutError", "RuntimeError"), survivor
        assert survivor.seconds < limit, survivor
    texts = [survivor.text for survivor in found.survivors]
    if cell.phase == "init":
        # Who met the victim's neighbours alone may name those: they left because of it.
        assert any(f"rank {cell.victim}" in text for text in texts), texts
        return
    for text in texts:
        assert f"rank {cell.victim}" in text and " in " in text, text
    if cell.phase in ("forward", "in forward", "backward", "in backward"):
        places = ("'blocks.", "'Net'", "'which parameters were used'")
        assert all(any(place in text for place in places) for text in texts), texts


def check_launcher(cell: Cell, found: Found) -> None:
    """It names the victim, unless that was stopped: then a survivor does."""
    error = found.launcher
    assert error is not None and not error.timed_out
    victim = error.tracebacks[cell.victim]
    if cell.fault == "stop":
        assert "stopped (SIGSTOP)" in victim
        assert error.rank != cell.victim and f"rank {cell.victim}" in error.tracebacks[error.rank]
    else:
        assert error.rank == cell.victim
        assert ("SIGKILL" if cell.fault == "kill" else f"Oops: {cell.phase}") in victim
    assert found.seconds < 5, "the launcher waited for its patience to end"


@pytest.mark.parametrize("cell", marked(ALL))
@pytest.mark.ranks(1, init=False, timeout=300)
def test_a_fault(cell: Cell, tmp_path: Path, notes: Path) -> None:
    before, names = descriptors(), shm_names()
    found = happen(cell, tmp_path)
    check_survivors(cell, found)
    check_launcher(cell, found)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # no process is left
    assert descriptors() == before and memfd_mappings() == [] and shm_left(names) == set()
    assert quiet_launch(cell.ranks) == [None] * cell.ranks
    slowest = max((s.seconds for s in found.survivors if s.kind), default=None)
    (notes / str(cell)).write_text(json.dumps([*cell, slowest, found.seconds]))
