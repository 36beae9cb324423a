"""Modules: the torch-free front door's building blocks."""

from fsdpc.nn import init
from fsdpc.nn.layers import Dropout, Embedding, LayerNorm, Linear, ModuleList, RMSNorm, Sequential
from fsdpc.nn.module import Module, Parameter, deferred_init

__all__ = [
    "Dropout", "Embedding", "LayerNorm", "Linear", "Module", "ModuleList", "Parameter",
    "RMSNorm", "Sequential", "deferred_init", "init",
]  # fmt: skip
