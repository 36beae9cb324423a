"""Options of :class:`fsdpc.torch.FullyShardedDataParallel`, with FSDP1's names and fields.

torch's own objects of the same names are taken wherever these are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn


class BackwardPrefetch(Enum):
    """When FSDP1 gathers ahead; the engine replays the recorded order."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """What ``state_dict()`` returns: full tensors, or this rank's pieces."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """What the states of an optimizer are found by."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class MixedPrecision:
    """FSDP1's dtypes.

    Parameters
    ----------
    param_dtype : torch.dtype, optional
        Of the gathered parameters and so of compute; the original dtype where not given.
    reduce_dtype : torch.dtype, optional
        In which gradients are sent; ``param_dtype`` where not given.
    buffer_dtype : torch.dtype, optional
        What floating buffers are cast to. State dicts hold them in their original dtype.
    keep_low_precision_grads : bool, default False
        Refused: gradients of pieces have the pieces' dtype.
    cast_forward_inputs : bool, default False
        Cast floating inputs of inner units.
    cast_root_forward_inputs : bool, default True
        Cast floating inputs of the module that is handed over.
    _module_classes_to_ignore : iterable of type
        Classes that an ``auto_wrap_policy`` leaves in their own dtype; batch norms.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Iterable[type[nn.Module]] = field(
        default_factory=lambda: (nn.modules.batchnorm._BatchNorm,)
    )


@dataclass
class CPUOffload:
    """Masters in host memory, where they are on CPUs anyway.

    Parameters
    ----------
    offload_params : bool, default False
    """

    offload_params: bool = False


@dataclass
class StateDictConfig:
    """What state dicts have in common.

    Parameters
    ----------
    offload_to_cpu : bool, default False
        They are in host memory in any case.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Full tensors, on all ranks or on rank 0.

    Parameters
    ----------
    offload_to_cpu : bool, default False
    rank0_only : bool, default False
        Other ranks take part and get an empty dict.
    """

    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """This rank's pieces."""


@dataclass
class OptimStateDictConfig:
    """What optimizer state dicts have in common.

    Parameters
    ----------
    offload_to_cpu : bool, default True
        They are in host memory in any case.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Full states by parameter name, on all ranks or on rank 0.

    Parameters
    ----------
    offload_to_cpu : bool, default True
    rank0_only : bool, default False
        Saving: other ranks get an empty dict. Loading: rank 0's is taken.
    """

    rank0_only: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """This rank's rows of the states, by parameter name."""


@dataclass
class StateDictSettings:
    """What :meth:`FullyShardedDataParallel.set_state_dict_type` set.

    Parameters
    ----------
    state_dict_type : StateDictType
    state_dict_config : StateDictConfig
    optim_state_dict_config : OptimStateDictConfig
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)
