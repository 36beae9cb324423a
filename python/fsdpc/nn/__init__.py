"""Modules: the building blocks of the torch-free frontend."""

from fsdpc.nn import init
from fsdpc.nn._hooks import HookHandle
from fsdpc.nn.activations import GELU, Flatten, Identity, ReLU, Sigmoid, SiLU, Softmax, Tanh
from fsdpc.nn.containers import ModuleDict, ModuleList, ParameterList, Sequential
from fsdpc.nn.convolution import AvgPool1d, AvgPool2d, Conv1d, Conv2d, MaxPool1d, MaxPool2d
from fsdpc.nn.layers import Dropout, Embedding, LayerNorm, Linear, RMSNorm
from fsdpc.nn.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
)
from fsdpc.nn.module import Module, Parameter, deferred_init
from fsdpc.nn.normalization import BatchNorm1d, BatchNorm2d, GroupNorm, SyncBatchNorm
from fsdpc.nn.quantized import QuantizedLinear, quantize_
from fsdpc.nn.transformer import MultiheadAttention, TransformerEncoderLayer

__all__ = [
    "AvgPool1d", "AvgPool2d", "BCEWithLogitsLoss", "BatchNorm1d", "BatchNorm2d", "Conv1d", "Conv2d",
    "CrossEntropyLoss", "Dropout", "Embedding", "Flatten", "GELU", "GroupNorm", "HookHandle",
    "Identity", "KLDivLoss", "L1Loss", "LayerNorm", "Linear", "MSELoss", "MaxPool1d", "MaxPool2d",
    "Module", "ModuleDict", "ModuleList", "MultiheadAttention", "NLLLoss", "Parameter",
    "ParameterList", "QuantizedLinear", "RMSNorm", "ReLU", "Sequential", "SiLU", "Sigmoid",
    "Softmax", "SyncBatchNorm", "Tanh", "TransformerEncoderLayer", "deferred_init", "init",
    "quantize_",
]  # fmt: skip
