"""DeepSpeed's learning rate schedules, as torch schedulers.

The first step has the lowest rate; step k, counted from 0, uses DeepSpeed's rate for iteration k -
1. Source: ``deepspeed/runtime/lr_schedules.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fsdpc.optim.lr_scheduler import warmup_share


class _Schedule(LRScheduler):
    """Computes the rate from the iteration (-1 before the first) and the group's base rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Callable[[int, float], float]):
        self._rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [self._rate(self.last_epoch - 1, base) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base_lrs": [float(b) for b in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self.base_lrs = list(state_dict["base_lrs"])
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


def _warmup(
    optimizer: Any,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    total_num_steps: int | None = None,
) -> _Schedule:
    low = warmup_min_lr
    high = optimizer.param_groups[0]["lr"] if warmup_max_lr is None else warmup_max_lr
    share = warmup_share(warmup_num_steps, warmup_type, total_num_steps)

    def rate(k: int, base: float) -> float:
        return low if k < 0 else low + (high - low) * share(k)

    return _Schedule(optimizer, rate)


def _decay(
    optimizer: Any, total_num_steps: int, warmup_max_lr: float = 0.001, **others: Any
) -> _Schedule:
    return _warmup(
        optimizer, warmup_max_lr=warmup_max_lr, total_num_steps=total_num_steps, **others
    )


def _cosine(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> _Schedule:
    share, steps = warmup_share(warmup_num_steps, warmup_type), max(2, warmup_num_steps)

    def rate(k: int, base: float) -> float:
        if k < 0:
            return 0.0
        if k < steps:
            return base * (warmup_min_ratio + (1 - warmup_min_ratio) * share(k))
        done = min(1.0, (k - steps + 1) / max(1, total_num_steps - steps))
        wave = (1 + math.cos(math.pi * done)) / 2
        return base * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * wave)

    return _Schedule(optimizer, rate)


#: By name in a configuration.
SCHEDULES: dict[str, Callable[..., _Schedule]] = {
    "WarmupLR": _warmup, "WarmupDecayLR": _decay, "WarmupCosineLR": _cosine,
}  # fmt: skip
