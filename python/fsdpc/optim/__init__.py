"""Optimizers that update whole flat shards in C: AdamW, Adam, SGD and Lion."""

from fsdpc.optim.adam import Adam, AdamW
from fsdpc.optim.lion import Lion
from fsdpc.optim.optimizer import Optimizer
from fsdpc.optim.sgd import SGD
from fsdpc.optim.state import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = [
    "SGD", "Adam", "AdamW", "Lion", "Optimizer", "get_optimizer_state_dict",
    "set_optimizer_state_dict",
]  # fmt: skip
