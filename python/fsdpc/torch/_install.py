"""Put fsdpc in the place of torch's ``fully_shard``, so that code written for FSDP2 runs unchanged.

    fsdpc run --ranks 2 --fsdp2 train.py

runs a script after :func:`install`. Frameworks import ``fully_shard`` from
``torch.distributed.fsdp`` when they need it; copies imported before are replaced too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from fsdpc.display.text import say

_NAMES = (
    "CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle",
    "fully_shard", "register_fsdp_forward_method", "share_comm_ctx",
)  # fmt: skip
#: Torch's modules that hand the names out; others are torch's own code for its own classes.
_DOORS = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
_pairs: dict[str, tuple[Any, Any]] = {}  # torch's object and ours, by name, while installed
_kept: set[tuple[int, str]] = set()  # places that had ours before: (id of the module, attribute)


def install() -> None:
    """Put fsdpc's names of FSDP2 into ``torch.distributed.fsdp``, for this process.

    ``fully_shard``, ``FSDPModule``, the policies, ``UnshardHandle``, ``share_comm_ctx`` and
    ``register_fsdp_forward_method`` are replaced, also in modules that have imported them already.
    Nothing else of torch changes. :func:`uninstall` reverts it.

    Raises
    ------
    RuntimeError
        This torch has no FSDP2 (it came with torch 2.6).

    Examples
    --------
    >>> import torch.distributed.fsdp
    >>> from fsdpc.torch import fully_shard, install, uninstall
    >>> install()
    >>> torch.distributed.fsdp.fully_shard is fully_shard
    True
    >>> uninstall()
    >>> torch.distributed.fsdp.fully_shard is fully_shard
    False
    """
    if _pairs:
        return
    from torch.distributed import fsdp

    import fsdpc.torch as ours

    if not hasattr(fsdp, "fully_shard"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard")
    theirs = {name: getattr(fsdp, name) for name in _NAMES if hasattr(fsdp, name)}
    for name, value in theirs.items():
        _pairs[name] = value, getattr(ours, name)
    _kept.update((id(module), key) for module, key, _ in _places(of_ours=True))
    for module, key, name in _places(of_ours=False):
        setattr(module, key, _pairs[name][1])
    if os.environ.get("RANK", "0") == "0":
        say("torch.distributed.fsdp.fully_shard is fsdpc's in this process")


def uninstall() -> None:
    """Put torch's names back that :func:`install` has replaced.

    Examples
    --------
    >>> from fsdpc.torch import uninstall
    >>> uninstall()  # does nothing without install()
    """
    for module, key, name in _places(of_ours=True):
        if (id(module), key) not in _kept:
            setattr(module, key, _pairs[name][0])
    _pairs.clear()
    _kept.clear()


def _places(of_ours: bool) -> list[tuple[Any, str, str]]:
    """Return (module, attribute, name) of each copy of these objects in the process's modules."""
    names = {id(pair[of_ours]): name for name, pair in _pairs.items()}
    found = []
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", ""))
        if name.startswith(("torch.", "fsdpc.")) and name not in _DOORS:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in names:
                found.append((module, key, names[id(value)]))
    return found
