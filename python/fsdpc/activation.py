"""Activation checkpointing: recompute in backward instead of keeping (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdpc import _core
from fsdpc._core import checkpoint
from fsdpc.nn.module import Module

__all__ = ["checkpoint", "checkpoint_activations"]


def checkpoint_activations(
    modules: Iterable[Module], which: str | int | float | Callable[[Module], bool] = "all"
) -> int:
    """Make modules keep their inputs only and run forward again inside backward.

    Parameters
    ----------
    modules : iterable of Module
        Candidates in order, e.g. ``model.blocks()``.
    which : "all", int, float or callable, default "all"
        All of them; every n-th; a ratio in (0, 1], evenly spread; or those for which the function
        says so, asked of every module inside the candidates too (attention only, say).

    Returns
    -------
    int
        How many modules were changed.

    Notes
    -----
    Results are bitwise the same: dropout draws the same numbers again.
    """
    candidates = list(modules)
    if callable(which):
        chosen = [m for top in candidates for m in top.modules() if which(m)]
    elif which == "all":
        chosen = candidates
    elif isinstance(which, int) and not isinstance(which, bool) and which >= 1:
        chosen = candidates[::which]
    elif isinstance(which, float) and 0 < which <= 1:
        n = len(candidates)
        chosen = [m for i, m in enumerate(candidates) if int((i + 1) * which) > int(i * which)]
        assert len(chosen) == int(n * which)
    else:
        raise ValueError(
            f"which must be 'all', a positive int, a ratio or a function, got {which!r}"
        )
    for module in chosen:
        _wrap(module)
    return len(chosen)


def _wrap(module: Module) -> None:
    if "forward" in module.__dict__:
        return
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not _core.is_grad_enabled():
            return forward(*args, **kwargs)
        return _core.checkpoint(forward, *args, **kwargs)

    module.__dict__["forward"] = recomputed
