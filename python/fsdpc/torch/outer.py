"""Outer steps of sharded modules, whose replicas train apart (DiLoCo)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsdpc import _core
from fsdpc.optim.outer import Rounds
from fsdpc.torch import optim_state
from fsdpc.torch._flat_optimizer import FlatOptimizer
from fsdpc.torch._unit import refuse_missing, states_of


class _Optimizer(FlatOptimizer):
    """Anchors and outer momentum as an optimizer's states; checkpoints read it like any other."""

    _kind = "Outer"

    @torch.no_grad()
    def end_round(self, group: int, options: Mapping[str, Any]) -> None:
        for each in self.param_groups:
            each.update(options)
        self._pass_hypers()
        self.follow()
        self._core.outer_step(group)

    def follow(self) -> None:
        """Take over what users have written to parameters."""
        for state in self._units.values():
            state.torch_unit.follow()


class Outer(Rounds):
    """Outer steps of a sharded module; see :class:`fsdpc.Outer`.

    Parameters
    ----------
    model : nn.Module
        All of its trainable parameters are sharded over a mesh with replicas, and have the values
        to start from. It has not run a forward yet.
    every : int
        Steps in a round.
    lr : float, default 0.7
        Of the outer step, as are momentum and nesterov.
    momentum : float, default 0.9
    nesterov : bool, default True
    groups : int, default 1
        The model's units are split into so many groups, whose rounds end at different steps.
    compression : {"bf16", "fp16", "int8", "fp8", "int4"}, optional
        The form of differences between hosts.

    Raises
    ------
    ValueError, TypeError, RuntimeError, NotImplementedError, MismatchError
        As for :class:`fsdpc.Outer`.

    Notes
    -----
    The model's inner optimizer is one of ``torch.optim`` or of ``fsdpc.torch.optim``. Parameters,
    ``full_tensor()`` and state dicts are the shard group's own between outer steps.

    Source: Douillard et al., DiLoCo, 2023, and Streaming DiLoCo, 2025 (without its overlap).

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import Outer, fully_shard
    >>> fully_shard(model, mesh=mesh)  # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # doctest: +SKIP
    >>> outer = Outer(model, every=100)  # doctest: +SKIP
    >>> for x in batches:  # doctest: +SKIP
    ...     model(x).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     outer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        groups: int = 1,
        compression: str | None = None,
    ) -> None:
        super().__init__(every, groups, lr, momentum, nesterov)
        self._model = model
        for state in states_of(model):
            if state.missing:
                refuse_missing(state)
        params = {n: p for n, p in self._named() if p.requires_grad}
        if plain := [n for n, p in params.items() if not hasattr(p, "fsdpc")]:
            raise ValueError(
                f"{len(plain)} trainable parameters are not sharded, the first is '{plain[0]}': "
                "call fully_shard(module, mesh=...) before making the Outer"
            )
        split = [{"params": [p for _, p in group]} for group in self._groups_of(params)]
        self.optimizer: Any = _Optimizer(split, self.options())
        self.optimizer.follow()
        self._begin(params, compression)

    def _named(self) -> Iterable[tuple[str, Any]]:
        names = optim_state._names(self._model)
        return [(names[id(p)], p) for p in self._model.parameters()]

    def _place(self, p: Any) -> tuple[_core.Unit, int]:
        return p.fsdpc.unit, p.fsdpc._index

    def _units(self) -> Iterable[_core.Unit]:
        return [state.unit for state in states_of(self._model)]
