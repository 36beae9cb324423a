"""Finds parameters that were initialised piece by piece from equal generators.

After sharding, ``for p in model.parameters(): nn.init.normal_(p)`` draws on every rank from the
beginning of one stream. So ranks get the same numbers for other rows, or for other parameters: a
piece may be a whole parameter. That would train, and be worse. So before the first forward ranks
compare how the pieces begin that were written since their values were those of full parameters.
What begins alike on two ranks, but for its scale, and is not constant, was drawn so.

What is written through ``.data`` is not seen, nor what narrow dtypes round otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fsdpc import _core

if TYPE_CHECKING:
    from fsdpc.torch._unit import UnitState

#: Generators fill shorter tensors by other rules than longer ones.
_BEGIN = 16


def check_drawn(states: list[UnitState]) -> None:
    """Raise if two ranks have the same random numbers; collective.

    Raises
    ------
    RuntimeError
        Names both parameters and both ranks, on every rank.
    """
    comm = states[0].comms[0]
    if comm.size == 1:
        return
    names = [f"'{s.unit.name}.{name}'" for s in states for name in s.names]
    marks = np.zeros(len(names), np.int64)
    at = 0
    for state in states:
        for i in state.written():
            marks[at + i] = _mark(state.pieces[i])
        at += len(state.pieces)
    every = comm.all_gather(_core.tensor(marks)).numpy()
    seen: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(every.tolist()):
        for k, mark in enumerate(row):
            other, j = seen.setdefault(mark, (rank, k)) if mark else (rank, k)
            if other != rank:
                raise RuntimeError(
                    f"parameters were initialised piece by piece, with equal generators: rank "
                    f"{rank} has the same numbers in its rows of {names[k]} as rank {other} in its "
                    f"own of {names[j]}. Call reset_parameters() or model.apply(fn), or draw "
                    "inside summon_full_params(model), where parameters are full"
                )


def _mark(piece: torch.Tensor) -> int:
    """How a piece begins, above 0; 0 for one that is constant there."""
    begin = piece.detach().reshape(-1)[:_BEGIN].cpu().double()
    if begin.numel() < 2 or bool((begin == begin[0]).all()):
        return 0
    if begin.numel() == _BEGIN:  # enough of them to tell, roughly, without their scale
        begin = (begin / begin.abs().max() * 1000).round()
    return 1 + _core.crc32c(begin.numel(), begin.view(torch.uint8).numpy())
