"""Detect parameters whose rows were initialised with identical random numbers.

``for p in model.parameters(): nn.init.normal_(p.to_local())`` draws the same random numbers on
every rank. Different rows then get the same values, and so do different parameters that are not
cut. The model would train, but badly. Before the first forward, ranks therefore compare the first
elements of all rows that were written directly rather than from a full parameter. If two ranks'
elements are the same up to a scale factor, and not constant, the ranks raise an error.

The check misses writes through ``.data``, and values that narrow dtypes round differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fsdpc import _core

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

#: Generators fill shorter tensors differently.
_BEGIN = 16


def check_drawn(states: list[UnitState]) -> None:
    """Raise if two ranks have the same random numbers; collective.

    Raises
    ------
    RuntimeError
        The error names both parameters and both ranks, on every rank.
    """
    for comm in dict.fromkeys(s.comms[0] for s in states):
        if comm.size > 1:
            _check_over(comm, [s for s in states if s.comms[0] is comm])


def _check_over(comm: _core.Comm, states: list[UnitState]) -> None:
    names = [f"'{s.unit.name}.{name}'" for s in states for name in s.names]
    marks = np.zeros(len(names), np.int64)
    at = 0
    for state in states:
        for i in state.written():
            marks[at + i] = _mark(state.rows[i])
        at += len(state.params)
    every = comm.all_gather(_core.tensor(marks)).numpy()
    seen: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(every.tolist()):
        for k, mark in enumerate(row):
            other, j = seen.setdefault(mark, (rank, k)) if mark else (rank, k)
            if other != rank:
                raise RuntimeError(
                    f"parameters were initialised rank by rank, with equal generators: rank "
                    f"{rank} has the same numbers in its rows of {names[k]} as rank {other} in its "
                    f"own of {names[j]}. Call reset_parameters() or model.apply(fn), or draw "
                    "inside summon_full_params(model), where parameters are full"
                )


def _mark(rows: torch.Tensor) -> int:
    """Return a positive hash of the first elements of rows, or 0 if they are constant."""
    begin = rows.detach().reshape(-1)[:_BEGIN].cpu().double()
    if begin.numel() < 2 or bool((begin == begin[0]).all()):
        return 0
    if begin.numel() == _BEGIN:  # enough to compare roughly, with the scale divided out
        begin = (begin / begin.abs().max() * 1000).round()
    return 1 + _core.crc32c(begin.numel(), begin.view(torch.uint8).numpy())
