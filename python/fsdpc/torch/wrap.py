"""Policies that say which submodules of a model become units, with FSDP1's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdpc.torch._module import FSDPModule

#: policy(module=..., recurse=..., nonwrapped_numel=...): go on into it, or make it a unit.
Policy = Callable[..., bool]


class ModuleWrapPolicy:
    """Make every module of these classes a unit.

    Parameters
    ----------
    module_classes : iterable of type
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Make every transformer layer a unit; given with ``functools.partial``.

    Parameters
    ----------
    module, recurse, nonwrapped_numel
        What the wrapper passes.
    transformer_layer_cls : set of type
        Classes of layers.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Make units of at least ``min_num_params`` parameters, innermost first.

    Parameters
    ----------
    module, recurse, nonwrapped_numel
        What the wrapper passes.
    min_num_params : int, default 100,000,000
    force_leaf_modules : set of type, optional
        Not looked into; nn.MultiheadAttention where not given.
    exclude_wrap_modules : set of type, optional
        Never units; ModuleList and ModuleDict where not given.
    """
    leaves = tuple(force_leaf_modules or {nn.MultiheadAttention})
    excluded = tuple(exclude_wrap_modules or {nn.ModuleList, nn.ModuleDict})
    if nonwrapped_numel < min_num_params:
        return False
    return not isinstance(module, leaves if recurse else excluded)


class CustomPolicy:
    """Let a function say what is a unit: True, False, or a dict of options that differ.

    Parameters
    ----------
    lambda_fn : callable
        Of a module; a dict holds arguments of :class:`fsdpc.torch.FullyShardedDataParallel`.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(self, root: nn.Module, ignored: Any, options: dict[str, Any]) -> Any:
        answers = {m: self._lambda_fn(m) for m in root.modules()}
        return {m: a if isinstance(a, dict) else {} for m, a in answers.items() if a or a == {}}


class _Wrapping:
    """What ``wrap`` does inside ``enable_wrap``."""

    stack: list[tuple[Callable[..., Any], dict[str, Any]]] = []


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., Any], **wrapper_kwargs: Any) -> Iterator[None]:
    """Let :func:`wrap` make units inside.

    Parameters
    ----------
    wrapper_cls : callable
        :class:`fsdpc.torch.FullyShardedDataParallel`.
    wrapper_kwargs
        Options of all of them.
    """
    _Wrapping.stack.append((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _Wrapping.stack.pop()


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Make a module a unit inside :func:`enable_wrap`; elsewhere leave it as it is.

    Parameters
    ----------
    module : nn.Module
    wrap_overrides
        Options that differ.
    """
    if not _Wrapping.stack:
        return module
    cls, options = _Wrapping.stack[-1]
    return cls(module, **{**options, **wrap_overrides})


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Make every module a unit that can be one."""
    return True


def apply_policy(
    root: nn.Module, policy: Any, ignored: set[int], shard: Callable[..., Any]
) -> None:
    """Call ``shard(module, **options)`` on the submodules that a policy chooses, inner ones first.

    Parameters
    ----------
    root : nn.Module
        Itself not sharded here.
    policy : callable, or a policy object of ``torch.distributed.fsdp.wrap``
    ignored : set of int
        Identities of parameters that do not count.
    shard : callable
    """
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(root, set(), {})
        for module in reversed(list(root.modules())):
            if module in chosen and module is not root and not isinstance(module, FSDPModule):
                shard(module, **chosen[module])
        return
    _wrap(root, policy, ignored, shard, True)


def _wrap(
    module: nn.Module, policy: Policy, ignored: set[int], shard: Callable[..., Any], root: bool
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
