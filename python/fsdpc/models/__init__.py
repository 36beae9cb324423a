"""Models to train: LLaMA-like models and GPT-2, from presets or published checkpoints."""

from fsdpc.models.config import PRESETS, ModelConfig, preset
from fsdpc.models.gpt2 import GPT2
from fsdpc.models.llama import Llama
from fsdpc.models.pretrained import (
    from_config,
    from_pretrained,
    load_pretrained,
    save_pretrained,
)
from fsdpc.models.rope import RopeScaling

__all__ = [
    "GPT2", "Llama", "ModelConfig", "PRESETS", "RopeScaling", "from_config", "from_pretrained",
    "load_pretrained", "preset", "save_pretrained",
]  # fmt: skip
