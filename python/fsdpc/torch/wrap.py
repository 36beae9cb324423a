"""Policies that say which submodules of a model become units: FSDP1's own.

They are torch's (``torch.distributed.fsdp.wrap``), imported when the first of them is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fsdpc.torch._module import FSDPModule


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from torch.distributed.fsdp import wrap

    return getattr(wrap, name)


def apply_policy(
    root: nn.Module, policy: Any, ignored: set[int], shard: Callable[..., Any]
) -> None:
    """Call ``shard(module, **options)`` on the submodules that a policy chooses, inner ones first.

    Not on ``root`` itself; parameters whose identities are ``ignored`` do not count.
    """
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(root, set(), {})
        for module in reversed(list(root.modules())):
            if module in chosen and module is not root and not isinstance(module, FSDPModule):
                shard(module, **chosen[module])
        return
    _wrap(root, policy, ignored, shard, True)


def _wrap(
    module: nn.Module, policy: Any, ignored: set[int], shard: Callable[..., Any], root: bool
) -> int:
    """Parameters of the module that are in units afterwards."""
    count = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
    if not policy(module=module, recurse=True, nonwrapped_numel=count):
        return 0
    inside = 0
    for child in module.children():
        if not isinstance(child, FSDPModule):
            inside += _wrap(child, policy, ignored, shard, False)
    can = type(module).forward is not nn.Module.forward
    if not root and can and policy(module=module, recurse=False, nonwrapped_numel=count - inside):
        shard(module)
        return count
    return inside
