"""Models to train: LLaMA and GPT-2, with presets from 2 M to 70 B parameters."""

from fsdpc.models.config import PRESETS, ModelConfig, preset
from fsdpc.models.generate import generate
from fsdpc.models.gpt2 import GPT2
from fsdpc.models.llama import Llama

__all__ = ["GPT2", "Llama", "ModelConfig", "PRESETS", "generate", "preset"]
