"""Policies that say which submodules of a model become units: FSDP1's own.

They are torch's (``torch.distributed.fsdp.wrap``), imported when the first of them is used.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from torch.distributed.fsdp import wrap

    return getattr(wrap, name)
