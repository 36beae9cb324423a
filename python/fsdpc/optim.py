"""Optimizers that step whole flat shards in C."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdpc import _core
from fsdpc.nn.module import Parameter


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as torch.optim.AdamW defines it.

    Parameters
    ----------
    params : iterable of Parameter, of (str, Parameter), or of dict
        Parameters, alone or with their names, or groups ``{"params": [...], "lr": ..., ...}`` with
        options of their own. Shard the model first.
    lr : float, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0.01
    maximize : bool, default False

    Raises
    ------
    ValueError
        An option is out of range, a parameter is given twice, or some are sharded and others are
        trainable, held by no unit and not ignored.

    Notes
    -----
    ``step`` is collective over the ranks of sharded parameters. It is one pass over memory: the
    scale that clipping left, the update, and the copy that the next forward reads. Parameters
    without a gradient are skipped. States are float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        groups = list(params)
        if not groups:
            raise ValueError("the optimizer got no parameters")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.param_groups: list[dict[str, Any]] = []
        self._core = _core.Optimizer("adamw")
        self._plain: dict[int, _PlainState] = {}
        self._units: list[Any] = []
        for i, group in enumerate(groups):
            unknown = set(group) - set(defaults) - {"params"}
            if unknown:
                raise ValueError(f"group {i} has unknown options {sorted(unknown)}")
            self._add_group({**defaults, **group, "params": list(group["params"])})
        self._refuse_strays()

    def _add_group(self, group: dict[str, Any]) -> None:
        index = len(self.param_groups)
        _check(group)
        for i, entry in enumerate(group["params"]):
            name, p = entry if isinstance(entry, tuple) else (None, entry)
            if not isinstance(p, Parameter):
                raise TypeError(
                    f"optimizers take Parameters, got {type(p).__name__} (group {index}, place {i})"
                )
            group["params"][i] = p
            label = f"'{name}'" if name else f"number {i} of group {index}"
            label += f" {p.shape} {p.dtype.name}"
            if p._unit is not None:
                self._core.add(p._unit, p._index, index)
                if p._unit not in self._units:
                    self._units.append(p._unit)
            elif id(p) in self._plain:
                raise ValueError(f"parameter {label} was given before: {self._plain[id(p)].label}")
            else:
                self._plain[id(p)] = _PlainState(label)
        self.param_groups.append(group)

    def _refuse_strays(self) -> None:
        """Refuse what would be trained apart on every rank, beside parameters that are sharded."""
        strays = [
            self._plain[id(p)].label
            for group in self.param_groups
            for p in group["params"]
            if p._unit is None and p.requires_grad and not getattr(p, "_ignored", False)
        ]
        if self._units and strays:
            raise ValueError(
                f"{len(strays)} trainable parameters belong to no unit, so their gradients would "
                f"differ between ranks: {'; '.join(strays)}; call fully_shard() on the module "
                "around them first, or give them as its ignored_params, or freeze them"
            )

    def _refuse_late_sharding(self) -> None:
        for group in self.param_groups if self._plain else ():
            for p in group["params"]:
                if p._unit is not None and id(p) in self._plain:
                    raise RuntimeError(
                        f"parameter '{p._name}' of unit '{p._unit.name}' was sharded after the "
                        "optimizer was made: call fully_shard() first, then make the optimizer"
                    )

    def step(self) -> None:
        """Update every parameter that has a gradient; collective for sharded ones."""
        self._refuse_late_sharding()
        for i, group in enumerate(self.param_groups):
            _check(group)
            b1, b2 = group["betas"]
            self._core.set_hyper(
                i, group["lr"], b1, b2, group["eps"], group["weight_decay"], group["maximize"]
            )
            if self._plain:
                self._step_plain(group)
        self._core.step()

    def _step_plain(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            state = self._plain.get(id(p))
            if state is None:
                continue
            if p.grad is None or not p.requires_grad:
                continue
            if state.exp_avg is None:
                state.exp_avg = _core.zeros(p.shape, dtype=_core.float32)
                state.exp_avg_sq = _core.zeros(p.shape, dtype=_core.float32)
            state.step += 1
            b1, b2 = group["betas"]
            _core.adamw_(
                p, p.grad, state.exp_avg, state.exp_avg_sq, state.step,
                group["lr"], b1, b2, group["eps"], group["weight_decay"], group["maximize"],
            )  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; touches no memory. ``set_to_none`` is accepted for PyTorch's sake."""
        for unit in self._units:
            unit.zero_grad()
        for group in self.param_groups:
            for p in group["params"]:
                if p._unit is None:
                    p.grad = None

    def state(self, p: Parameter) -> dict[str, Any]:
        """Return flat copies of the states of this rank's rows, and the step count."""
        if p._unit is not None:
            return {
                "step": self._core.step_count(p._unit, p._index),
                "exp_avg": self._core.state(p._unit, p._index, 0),
                "exp_avg_sq": self._core.state(p._unit, p._index, 1),
            }
        s = self._plain.get(id(p))
        if s is None:
            raise KeyError(f"the optimizer was not given this parameter {p.shape} {p.dtype.name}")
        return {"step": s.step, "exp_avg": s.exp_avg, "exp_avg_sq": s.exp_avg_sq}


class _PlainState:
    """States of a parameter that is not sharded."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.step = 0
        self.exp_avg: Any = None
        self.exp_avg_sq: Any = None


def _check(group: dict[str, Any]) -> None:
    b1, b2 = group["betas"]
    bounds = {
        "lr": group["lr"] >= 0,
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "betas": 0 <= b1 < 1 and 0 <= b2 < 1,
    }
    for name, fine in bounds.items():
        if not fine:
            raise ValueError(f"{name} is out of range: {group[name]}")
