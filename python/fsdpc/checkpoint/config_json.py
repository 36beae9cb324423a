"""``config.json``, by which transformers' ``from_pretrained`` identifies a folder's model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fsdpc.sharding.fsdp_module import plain_class

NAME = "config.json"

#: Functions that return the content for a model, or None; packages that define models register
#: here.
writers: list[Callable[[Any], dict[str, Any] | None]] = []


def of_model(model: Any) -> str | None:
    """Return the content of ``config.json`` for a model that transformers or a writer knows.

    The model may be sharded. Returns None for all other models.
    """
    content: dict[str, Any] | None = None
    known = [(c.__module__, c.__name__) for c in type(model).__mro__]
    if ("transformers.modeling_utils", "PreTrainedModel") in known:
        name = plain_class(type(model)).__name__
        content = json.loads(model.config.to_json_string()) | {"architectures": [name]}
    for writer in writers:
        content = content or writer(model)
    if content is None:
        return None
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
