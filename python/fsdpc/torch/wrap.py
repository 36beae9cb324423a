"""FSDP1's policies for selecting the submodules that become units.

The policies are torch's own (``torch.distributed.fsdp.wrap``), imported on first use.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from torch.distributed.fsdp import wrap

    return getattr(wrap, name)
