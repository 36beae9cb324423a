"""Optimizers that update whole flat shards in C."""

from fsdpc.optim import elementwise as _elementwise
from fsdpc.optim import factored as _factored
from fsdpc.optim import matrix as _matrix
from fsdpc.optim.elementwise import *  # noqa: F403
from fsdpc.optim.elementwise import BY_NAME as _BY_NAME
from fsdpc.optim.factored import *  # noqa: F403
from fsdpc.optim.factored import Adafactor as _Adafactor
from fsdpc.optim.formats import Int8
from fsdpc.optim.matrix import *  # noqa: F403
from fsdpc.optim.matrix import Muon as _Muon
from fsdpc.optim.optimizer import Optimizer
from fsdpc.optim.state import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = ["Int8", "Optimizer", "get_optimizer_state_dict", "set_optimizer_state_dict"]
__all__ += _elementwise.__all__
__all__ += _factored.__all__
__all__ += _matrix.__all__

#: Every optimizer by its name in commands and plans.
BY_NAME = {**_BY_NAME, "muon": _Muon, "adafactor": _Adafactor}
