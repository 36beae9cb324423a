"""Learning rate schedules.

A scheduler multiplies each parameter group's initial learning rate by a factor that depends on the
step. A scheduler works with any optimizer whose ``param_groups`` is a list of dicts that contain
``"lr"``. Call ``step()`` once after every optimizer step. After its last step, a schedule keeps the
minimum learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

__all__ = [
    "LRScheduler", "LambdaLR", "WarmupCosine", "WarmupDecayLR", "WarmupLinearDecay",
    "WarmupStableDecay", "scale_lr", "schedule_by_name",
]  # fmt: skip


class LRScheduler:
    """Base class for all schedules; subclasses override :meth:`factor`.

    Parameters
    ----------
    optimizer : object with ``param_groups``
        Groups without ``"initial_lr"`` get one, and the first ``"lr"`` is set immediately.

    Raises
    ------
    TypeError
        The optimizer lacks ``param_groups`` with ``"lr"``.

    Examples
    --------
    >>> from fsdpc import lr_scheduler, nn, optim
    >>> class Halved(lr_scheduler.LRScheduler):
    ...     def factor(self, step, group):
    ...         return 0.5 if step else 1.0
    >>> optimizer = optim.AdamW(nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule = Halved(optimizer)
    >>> optimizer.step()
    >>> schedule.step()
    >>> optimizer.param_groups[0]["lr"]
    0.5
    """

    def __init__(self, optimizer: Any) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if not groups or not all("lr" in group for group in groups):
            raise TypeError(
                f"{type(optimizer).__name__} is no optimizer to schedule: it needs param_groups, a "
                "list of dicts that hold 'lr'"
            )
        self.optimizer = optimizer
        self.last_step: int = 0
        for group in groups:
            group.setdefault("initial_lr", group["lr"])
        self._apply()

    def factor(self, step: int, group: int) -> float:
        """Return the factor for a group's initial learning rate at a step.

        Parameters
        ----------
        step : int
            Number of optimizer steps so far.
        group : int
            The group's index in ``param_groups``.
        """
        raise NotImplementedError("a schedule defines factor(step, group)")

    def step(self) -> None:
        """Advance to the next step."""
        self.last_step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state as plain numbers and lists."""
        first = [group["initial_lr"] for group in self.optimizer.param_groups]
        return {"last_step": self.last_step, "initial_lrs": first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a schedule's state, including the initial learning rate of each group.

        Raises
        ------
        ValueError
            The saved optimizer had a different number of groups.
        """
        groups = self.optimizer.param_groups
        if len(state["initial_lrs"]) != len(groups):
            raise ValueError(
                f"the state is of {len(state['initial_lrs'])} parameter groups, the optimizer has "
                f"{len(groups)}"
            )
        for group, first in zip(groups, state["initial_lrs"]):
            group["initial_lr"] = first
        self.last_step = int(state["last_step"])
        self._apply()

    def _apply(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = group["initial_lr"] * self.factor(self.last_step, index)


class WarmupCosine(LRScheduler):
    """Linear warm-up followed by one or more cosine decays to a minimum.

    Parameters
    ----------
    optimizer : object with ``param_groups``
        See :class:`LRScheduler`.
    warmup : int
        Warm-up steps: step s runs at ``(s + 1) / warmup``.
    total : int
        Steps of the whole schedule, including the warm-up.
    min_ratio : float
        The final learning rate, as a fraction of the initial one; default 0.
    cycles : int
        Number of cosines after the warm-up, each from the full rate; default 1.

    Raises
    ------
    ValueError
        An argument is out of range; the message has its value.

    Notes
    -----
    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    Examples
    --------
    >>> from fsdpc import lr_scheduler, nn, optim
    >>> optimizer = optim.AdamW(nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule = lr_scheduler.WarmupCosine(optimizer, warmup=2, total=6)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """

    def __init__(
        self, optimizer: Any, warmup: int, total: int, min_ratio: float = 0.0, cycles: int = 1
    ) -> None:
        _check_steps(warmup=warmup, total=total)
        _check_ratio(min_ratio)
        if warmup >= total:
            raise ValueError(f"warmup ({warmup}) must be smaller than total ({total})")
        if not isinstance(cycles, int) or cycles < 1:
            raise ValueError(f"cycles must be a whole number of at least 1, got {cycles!r}")
        self.warmup: int = warmup
        self.total: int = total
        self.min_ratio: float = min_ratio
        self.cycles: int = cycles
        super().__init__(optimizer)

    def factor(self, step: int, group: int) -> float:
        """Return the factor at a step; see :meth:`LRScheduler.factor`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if step >= self.total:
            return self.min_ratio
        # Use integer arithmetic before dividing, so that each cycle begins at exactly 1.
        phase = (step - self.warmup) * self.cycles % (self.total - self.warmup)
        cosine = math.cos(math.pi * phase / (self.total - self.warmup))
        return self.min_ratio + (1 - self.min_ratio) * (1 + cosine) / 2


class WarmupStableDecay(LRScheduler):
    """Linear warm-up, a plateau, then a decay to a minimum (WSD).

    Parameters
    ----------
    optimizer : object with ``param_groups``
        See :class:`LRScheduler`.
    warmup, stable, decay : int
        Steps of the three phases.
    min_ratio : float
        The final learning rate, as a fraction of the initial one; default 0.
    shape : {"linear", "cosine", "sqrt"}
        Shape of the decay: a line, half a cosine, or 1 - sqrt(t); default "linear".

    Raises
    ------
    ValueError
        An argument is out of range; the message has its value.

    Notes
    -----
    Sources: Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models", 2024; Hagele et
    al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024 (sqrt).

    Examples
    --------
    >>> from fsdpc import lr_scheduler, nn, optim
    >>> optimizer = optim.AdamW(nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule = lr_scheduler.WarmupStableDecay(optimizer, warmup=1, stable=2, decay=2)
    >>> rates = []
    >>> for _ in range(5):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [1.0, 1.0, 1.0, 1.0, 0.5]
    """

    def __init__(
        self,
        optimizer: Any,
        warmup: int,
        stable: int,
        decay: int,
        min_ratio: float = 0.0,
        shape: str = "linear",
    ) -> None:
        _check_steps(warmup=warmup, stable=stable, decay=decay)
        _check_ratio(min_ratio)
        if shape not in _SHAPES:
            raise ValueError(f"shape must be one of {', '.join(_SHAPES)}, got {shape!r}")
        self.shape = shape
        self.warmup: int = warmup
        self.stable: int = stable
        self.decay: int = decay
        self.min_ratio = min_ratio
        super().__init__(optimizer)

    def factor(self, step: int, group: int) -> float:
        """Return the factor at a step; see :meth:`LRScheduler.factor`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        into_decay = step - self.warmup - self.stable
        if into_decay < 0:
            return 1.0
        if into_decay >= self.decay:
            return self.min_ratio
        return 1 - (1 - self.min_ratio) * _SHAPES[self.shape](into_decay / self.decay)


class WarmupLinearDecay(WarmupStableDecay):
    """Linear warm-up followed by a linear decay to a minimum.

    Parameters
    ----------
    optimizer : object with ``param_groups``
        See :class:`LRScheduler`.
    warmup : int
        Warm-up steps.
    total : int
        Steps of the whole schedule, including the warm-up.
    min_ratio : float
        The final learning rate, as a fraction of the initial one; default 0.

    Raises
    ------
    ValueError
        An argument is out of range; the message has its value.

    Examples
    --------
    >>> from fsdpc import lr_scheduler, nn, optim
    >>> optimizer = optim.AdamW(nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule = lr_scheduler.WarmupLinearDecay(optimizer, warmup=2, total=6)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    def __init__(self, optimizer: Any, warmup: int, total: int, min_ratio: float = 0.0) -> None:
        _check_steps(warmup=warmup, total=total)
        if warmup >= total:
            raise ValueError(f"warmup ({warmup}) must be smaller than total ({total})")
        super().__init__(optimizer, warmup, 0, total - warmup, min_ratio)


#: The completed fraction of a decay after a fraction t of its steps.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2,
    "sqrt": math.sqrt,
}


def warmup_share(steps: int, kind: str, total: int | None = None) -> Callable[[int], float]:
    """Return a function that computes DeepSpeed's warm-up and decay factor at an iteration.

    Parameters
    ----------
    steps : int
        Warm-up steps, at least 2.
    kind : {"log", "linear"}
        "log" follows the logarithm of the step.
    total : int, optional
        Steps of the whole schedule: after the warm-up the factor decays linearly to 0. Without it,
        the factor stays 1.

    Raises
    ------
    ValueError
        The kind is unknown.

    Notes
    -----
    Source: ``deepspeed/runtime/lr_schedules.py``.
    """
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', got {kind!r}")
    steps = max(2, steps)

    def share(k: int) -> float:
        if k < steps:
            return math.log(k + 1) / math.log(steps) if kind == "log" else k / steps
        return 1.0 if total is None else max(0.0, (total - k) / max(1, total - steps))

    return share


class WarmupDecayLR(LRScheduler):
    """DeepSpeed's WarmupDecayLR: warm-up to a maximum rate, then linear decay to 0.

    Parameters
    ----------
    optimizer : object with ``param_groups``
        See :class:`LRScheduler`; its own learning rates are ignored.
    total_num_steps : int
        Steps of the whole schedule.
    warmup_min_lr, warmup_max_lr : float
        Learning rates at both ends of the warm-up; default 0 and 0.001.
    warmup_num_steps : int
        Warm-up steps, at least 2; default 1000.
    warmup_type : {"log", "linear"}
        "log" follows the logarithm of the step; default "log".

    Raises
    ------
    ValueError
        An argument is out of range; the message has its value.

    Notes
    -----
    DeepSpeed counts iterations from the end of the first step, so the first two steps run at
    ``warmup_min_lr``.

    Examples
    --------
    >>> from fsdpc import lr_scheduler, nn, optim
    >>> optimizer = optim.AdamW(nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule = lr_scheduler.WarmupDecayLR(
    ...     optimizer, 6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear"
    ... )
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.0, 0.0, 0.5, 1.0, 0.75, 0.5]
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        _check_steps(total_num_steps=total_num_steps, warmup_num_steps=warmup_num_steps)
        if not 0 <= warmup_min_lr <= warmup_max_lr or not 0 < warmup_max_lr < math.inf:
            raise ValueError(
                f"warmup_min_lr {warmup_min_lr} and warmup_max_lr {warmup_max_lr}: from 0 on, in "
                "this order"
            )
        self._share = warmup_share(warmup_num_steps, warmup_type, total_num_steps)
        self.least: float = warmup_min_lr / warmup_max_lr
        for group in getattr(optimizer, "param_groups", ()):
            group["initial_lr"] = warmup_max_lr
        super().__init__(optimizer)

    def factor(self, step: int, group: int) -> float:
        """Return the multiplier at a step; see :meth:`LRScheduler.factor`."""
        return self.least + (1 - self.least) * self._share(max(step - 1, 0))


class LambdaLR(LRScheduler):
    """A schedule defined by any function of the step.

    Parameters
    ----------
    optimizer : object with ``param_groups``
        See :class:`LRScheduler`.
    functions : callable or sequence of callable
        ``fn(step)`` returns the factor; one function for all groups, or one per group.

    Raises
    ------
    ValueError
        The numbers of functions and groups differ.

    Examples
    --------
    >>> from fsdpc import lr_scheduler, nn, optim
    >>> optimizer = optim.AdamW(nn.Linear(2, 1).parameters(), lr=1.0)
    >>> schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    >>> rates = []
    >>> for _ in range(4):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [1.0, 0.5, 0.25, 0.125]
    """

    def __init__(
        self,
        optimizer: Any,
        functions: Callable[[int], float] | Sequence[Callable[[int], float]],
    ) -> None:
        groups = len(getattr(optimizer, "param_groups", ()))
        self.functions: list[Callable[[int], float]] = (
            [functions] * groups if callable(functions) else list(functions)
        )
        if len(self.functions) != groups:
            raise ValueError(f"{len(self.functions)} functions for {groups} parameter groups")
        super().__init__(optimizer)

    def factor(self, step: int, group: int) -> float:
        """Return the multiplier at a step; see :meth:`LRScheduler.factor`."""
        return float(self.functions[group](step))


def schedule_by_name(name: str, optimizer: Any, **options: Any) -> LRScheduler:
    """Create a schedule by name, as a configuration specifies it.

    Parameters
    ----------
    name : {"cosine", "linear", "wsd", "wsd-cosine", "wsd-sqrt", "WarmupDecayLR"}
    optimizer : object with ``param_groups``
    **options
        Options of the schedule's class.

    Raises
    ------
    ValueError
        The name is unknown; the message lists the known ones.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}])
    >>> schedule = schedule_by_name("wsd-cosine", optimizer, warmup=0, stable=1, decay=4)
    >>> schedule.step()
    >>> [round((schedule.step(), schedule.get_last_lr()[0])[1], 3) for _ in range(4)]
    [0.854, 0.5, 0.146, 0.0]
    """
    if name not in _NAMES:
        raise ValueError(f"no schedule '{name}'; there are {', '.join(_NAMES)}")
    return _NAMES[name](optimizer, **options)


_NAMES: dict[str, Callable[..., LRScheduler]] = {
    "cosine": WarmupCosine,
    "linear": WarmupLinearDecay,
    "wsd": WarmupStableDecay,
    "wsd-cosine": partial(WarmupStableDecay, shape="cosine"),
    "wsd-sqrt": partial(WarmupStableDecay, shape="sqrt"),
    "WarmupDecayLR": WarmupDecayLR,
}


def scale_lr(
    lr: float,
    ranks: int = 1,
    rule: str = "linear",
    *,
    batch: float | None = None,
    base_batch: float | None = None,
) -> float:
    """Scale a learning rate for a larger batch.

    Parameters
    ----------
    lr : float
        The learning rate for one rank's batch, or for ``base_batch``.
    ranks : int
        Number of ranks, each with such a batch; default 1.
    rule : {"linear", "sqrt"}
        Multiply by the batch's growth (SGD), or by its square root (Adam); default "linear".
    batch, base_batch : float, optional
        The batch to train with and the batch that ``lr`` was tuned for, in sequences or tokens.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        An argument is out of range; the message has its value.

    Notes
    -----
    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017 (linear); Malladi et al., "On the
    SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022 (square root).

    Examples
    --------
    >>> scale_lr(0.1, 4), scale_lr(0.1, 4, "sqrt"), scale_lr(0.1, batch=512, base_batch=128)
    (0.4, 0.2, 0.4)
    """
    if not lr > 0 or not math.isfinite(lr):
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks!r}")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule must be 'linear' or 'sqrt', got {rule!r}")
    if (batch is None) != (base_batch is None):
        raise ValueError("give both batch and base_batch, or neither")
    growth = float(ranks)
    if batch is not None and base_batch is not None:
        if not (0 < batch < math.inf and 0 < base_batch < math.inf):
            raise ValueError(f"batch {batch} and base_batch {base_batch} must be above 0")
        growth *= batch / base_batch
    return lr * (growth if rule == "linear" else math.sqrt(growth))


def _check_steps(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} must be a whole number of steps, at least 0, got {count!r}")


def _check_ratio(min_ratio: float) -> None:
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio must be between 0 and 1, got {min_ratio!r}")
