"""Optimizers that update whole flat shards in C."""

from fsdpc.optim import elementwise as _elementwise
from fsdpc.optim.elementwise import *  # noqa: F403
from fsdpc.optim.elementwise import BY_NAME as BY_NAME
from fsdpc.optim.formats import Int8
from fsdpc.optim.optimizer import Optimizer
from fsdpc.optim.state import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = ["Int8", "Optimizer", "get_optimizer_state_dict", "set_optimizer_state_dict"]
__all__ += _elementwise.__all__
