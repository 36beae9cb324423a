"""Optimizers that update whole flat shards in C, one row each of the engine's table."""

from typing import Any

from fsdpc.optim.adam import Adam, AdamW
from fsdpc.optim.lion import Lion
from fsdpc.optim.optimizer import Optimizer
from fsdpc.optim.sgd import SGD
from fsdpc.optim.state import get_optimizer_state_dict, set_optimizer_state_dict

#: Every optimizer by its name in commands and plans.
BY_NAME: dict[str, Any] = {each._KIND.lower(): each for each in (AdamW, Adam, SGD, Lion)}

__all__ = [
    "SGD", "Adam", "AdamW", "Lion", "Optimizer", "get_optimizer_state_dict",
    "set_optimizer_state_dict",
]  # fmt: skip
