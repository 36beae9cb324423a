"""``config.json``, by which transformers' ``from_pretrained`` knows what model a folder holds."""

from __future__ import annotations

import json
from typing import Any

from fsdpc.fsdp_module import plain_class
from fsdpc.models.gpt2 import GPT2
from fsdpc.models.llama import Llama
from fsdpc.models.pretrained import adapters_of
from fsdpc.models.published import written_config

NAME = "config.json"

def of_model(model: Any) -> bytes | None:
    """Return the file's content for a model of transformers, or one of ours with its layout.

    Sharded or not. None for models that transformers does not know.
    """
    known = [(c.__module__, c.__name__) for c in type(model).__mro__]
    if ("transformers.modeling_utils", "PreTrainedModel") in known:
        name = plain_class(type(model)).__name__
        content = json.loads(model.config.to_json_string()) | {"architectures": [name]}
    elif isinstance(model, (Llama, GPT2)):
        try:
            content = content_of(model)
        except ValueError:  # of a shape that none of transformers' models has
            return None
    else:
        return None
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def content_of(model: Llama | GPT2) -> dict[str, Any]:
    """Return the content for a model of ours; ValueError where transformers has none like it."""
    if adapters_of(model):
        raise ValueError("the model has adapters: lora.merge() them, or lora.save() them alone")
    return written_config(model.config, "gpt2" if isinstance(model, GPT2) else None)
