"""Outer steps of replicas that train apart: DiLoCo.

The engine has a row "Outer" in its table of optimizers, whose states are the anchor and the outer
momentum. They are created, saved and loaded as any optimizer's states. `Rounds` is what both
frontends share.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fsdpc import _core
from fsdpc.distributed.agree import agreed
from fsdpc.nn.module import Module, Parameter
from fsdpc.optim.optimizer import Optimizer

ANCHOR, MOMENTUM = "anchor", "outer_momentum"  # the states' names in the engine's table
_owners: weakref.WeakKeyDictionary[_core.Unit, weakref.ref[Rounds]] = weakref.WeakKeyDictionary()


class Rounds:
    """Base class of both frontends' Outer: when rounds end, and what is refused.

    Parameters
    ----------
    every : int
    groups : int
    lr, momentum : float
    nesterov : bool
    """

    #: An optimizer of the frontend over the engine's row "Outer".
    optimizer: Any

    def __init__(
        self, every: int, groups: int, lr: float, momentum: float, nesterov: bool
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: a round has one step or more")
        if not isinstance(groups, int) or not 1 <= groups <= every:
            raise ValueError(f"groups={groups!r}: from 1 to the {every} steps of a round")
        self.every: int = every
        self.groups: int = groups
        self.lr: float = lr
        self.momentum: float = momentum
        self.nesterov: bool = nesterov
        self.calls: int = 0
        self._params: dict[str, Any] = {}

    def __repr__(self) -> str:
        options = f"every={self.every}, groups={self.groups}, {self.options()}, calls={self.calls}"
        return f"{type(self).__name__}({options})"

    def options(self) -> dict[str, Any]:
        """Return the options of the outer optimizer."""
        return {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}

    def in_round(self) -> bool:
        """Return whether any parameters have trained apart since their last outer step."""
        return self.groups > 1 or self.calls % self.every != 0

    def step(self) -> None:
        """Count a step, and make the outer steps that are due; call it after ``optimizer.step()``.

        Every rank calls it equally often. An outer step is collective over all ranks, and other
        calls are local.
        """
        self.calls += 1
        for group in range(self.groups):
            end = (group + 1) * self.every // self.groups
            if self.calls % self.every == end % self.every:
                self._refuse_changed()
                self.optimizer.end_round(group, self.options())

    def comms(self) -> tuple[_core.Comm, _core.Comm]:
        """Return the communicators of this rank's shard group, and of its replicas."""
        shard, replicas = self._place(next(iter(self._params.values())))[0].comms
        return shard, replicas

    def _place(self, p: Any) -> tuple[_core.Unit, int]:
        """Return a parameter's unit and its index there."""
        raise NotImplementedError

    def _named(self) -> Iterable[tuple[str, Any]]:
        """Return all of the model's parameters by name."""
        raise NotImplementedError

    def _units(self) -> Iterable[_core.Unit]:
        """Return all of the model's units."""
        raise NotImplementedError

    def _groups_of(self, params: Mapping[str, Any]) -> list[list[tuple[str, Any]]]:
        """Split parameters by their units, into as many groups of units as ``groups`` says."""
        units: list[_core.Unit] = []
        for p in params.values():
            if self._place(p)[0] not in units:
                units.append(self._place(p)[0])
        if not units:
            raise ValueError("the model has no trainable parameters for outer steps")
        if self.groups > len(units):
            raise ValueError(f"groups={self.groups}: the model has {len(units)} trainable units")
        groups: list[list[tuple[str, Any]]] = [[] for _ in range(self.groups)]
        for name, p in params.items():
            at = units.index(self._place(p)[0])
            groups[at * self.groups // len(units)].append((name, p))
        return groups

    def _begin(self, params: dict[str, Any], compression: str | None) -> None:
        """Let replicas train apart; collective."""
        units = {self._place(p)[0] for p in params.values()}
        for unit in units:
            owner = _owners.get(unit, lambda: None)()
            if owner is not None and owner is not self:
                raise ValueError(f"unit '{unit.name}' has an Outer already")
        self.optimizer._core.outer_begin(compression or "exact")
        self._params = params
        for unit in self._units():  # frozen ones too: a model has one schedule
            if unit.comms[1:] == [self.comms()[1]]:
                unit.train_apart()
        agreed(self._compare_replicas)
        _owners.update((unit, weakref.ref(self)) for unit in units)

    def _compare_replicas(self) -> None:
        """Raise if replicas would start from different values."""
        names = list(self._params)
        places = [self._place(p) for p in self._params.values()]
        shards = [_core.master_shard(unit, i, False)[0] for unit, i in places]
        crcs = [_core.crc32c(0, shard.bits()) if shard.numel() else 0 for shard in shards]
        mine = np.array(crcs, np.int64)
        every = self.comms()[1].all_gather(_core.tensor(mine)).numpy()
        differ = np.flatnonzero((every.reshape(-1, mine.size) != mine).any(0))
        if differ.size:
            raise _core.MismatchError(
                f"replicas start from different values of '{names[differ[0]]}': load the same "
                "weights on every rank before making the Outer"
            )

    def _refuse_changed(self) -> None:
        changed = [n for n, p in self._named() if p.requires_grad != (n in self._params)]
        if changed:
            raise RuntimeError(
                f"{len(changed)} parameters were frozen or unfrozen since the Outer was made, the "
                f"first is '{changed[0]}': replicas could keep their own values of them; set "
                "requires_grad before making the Outer"
            )


class _Optimizer(Optimizer):
    """Anchors and outer momentum as an optimizer's states; checkpoints read it like any other."""

    _KIND = "Outer"

    def end_round(self, group: int, options: Mapping[str, Any]) -> None:
        for each in self.param_groups:
            each.update(options)
        self._refuse_late_sharding()
        self._set_options()
        self._core.outer_step(group)


class Outer(Rounds):
    """Outer steps: replicas train apart for a round, then take a step together (DiLoCo).

    Parameters
    ----------
    model : Module
        Sharded over a mesh with replicas, with the weights to start from, before its first forward.
    every : int
        Steps in a round.
    lr : float, default 0.7
        Of the outer step, as are momentum and nesterov. The attributes of these names may change
        between rounds.
    momentum : float, default 0.9
    nesterov : bool, default True
    groups : int, default 1
        The model's units are split into so many groups, in order, which take turns. The first round
        of group g has ``(g + 1) * every // groups`` steps, and its other rounds have ``every``.
    compression : {"bf16", "fp16", "int8", "fp8", "int4"}, optional
        The form of differences between hosts, as of gradients in :class:`fsdpc.Compression`.

    Attributes
    ----------
    calls : int
        Calls of :meth:`step` so far.
    optimizer : Optimizer
        Has the states "anchor" and "outer_momentum", sharded like masters.

    Raises
    ------
    ValueError
        The mesh has no replicas, an option is out of range, or the model has an Outer already.
    TypeError
        A trainable parameter is neither float32 nor float64.
    RuntimeError
        The model has run a forward already.
    NotImplementedError
        Units are on several meshes or GPUs, or their masters, gradients or states are offloaded.
    MismatchError
        Replicas start from different values.

    Notes
    -----
    A shard group then trains as a model on a mesh without replicas: gradients, norms and clipping
    are the group's, and :func:`full_tensor` returns the group's values. At the end of a round, with
    the arithmetic of :class:`fsdpc.optim.SGD` in the parameter's dtype::

        gradient = mean over replicas of (anchor - parameter)
        anchor = the step of SGD from anchor;  parameter = anchor

    With ``every=1, lr=1, momentum=0, nesterov=False``, parameters become
    ``anchor - mean(anchor - parameter)``, bit for bit. Inner optimizers keep their states, which
    differ between replicas. Buffers, such as the statistics of BatchNorm, are not averaged.

    Memory: 8 bytes per element over the ranks of a shard group (4 without momentum), and twice the
    largest unit's shard. Checkpoints take it as ``"outer"``.

    Source: Douillard et al., DiLoCo, 2023, and Streaming DiLoCo, 2025 (without its overlap).

    Examples
    --------
    >>> import fsdpc
    >>> mesh = fsdpc.init_device_mesh("cpu", (2, 2))  # doctest: +SKIP
    >>> fsdpc.fully_shard(model, mesh=mesh)  # doctest: +SKIP
    >>> optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)  # doctest: +SKIP
    >>> outer = fsdpc.Outer(model, every=100)  # doctest: +SKIP
    >>> for x in batches:  # doctest: +SKIP
    ...     model(x).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     outer.step()
    """

    def __init__(
        self,
        model: Module,
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
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if plain := [n for n, p in params.items() if p._unit is None]:
            raise ValueError(
                f"{len(plain)} trainable parameters are not sharded, the first is '{plain[0]}': "
                "call fully_shard(module, mesh=...) before making the Outer"
            )
        split = [{"params": group} for group in self._groups_of(params)]
        self.optimizer: Any = _Optimizer(split, self.options())
        self._begin(params, compression)

    def _named(self) -> Iterable[tuple[str, Any]]:
        return self._model.named_parameters()

    def _place(self, p: Parameter) -> tuple[_core.Unit, int]:
        return p._unit, p._index

    def _units(self) -> Iterable[_core.Unit]:
        found = (getattr(m, "_fsdpc_unit", None) for m in self._model.modules())
        return {unit for unit in found if unit is not None}


__all__ = ["Outer"]
