"""``FullyShardedDataParallel``: FSDP1's class over the same units.

The wrapped module is sharded in place by :func:`fsdpc.torch.fully_shard`; the wrapper keeps
FSDP1's methods, and names as the plain module has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from fsdpc.torch import optim_state, state_dict
from fsdpc.torch._module import FSDPModule, fully_shard
from fsdpc.torch._unit import Root
from fsdpc.torch.clip import clip_grad_norm_
from fsdpc.torch.policies import MixedPrecisionPolicy
from fsdpc.torch.wrap import apply_policy


class ShardingStrategy(Enum):
    """What ranks share out; see :class:`fsdpc.strategies.ShardingStrategy`."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When FSDP1 gathers ahead; the engine replays the recorded order."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """What ``state_dict()`` returns: full tensors, or this rank's pieces."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class MixedPrecision:
    """FSDP1's dtypes; ``buffer_dtype`` is what floating buffers are cast to.

    Parameters
    ----------
    param_dtype, reduce_dtype, buffer_dtype : torch.dtype, optional
    keep_low_precision_grads : bool, default False
        Refused: gradients of pieces have the pieces' dtype.
    cast_forward_inputs : bool, default False
    cast_root_forward_inputs : bool, default True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True


@dataclass
class CPUOffload:
    """Masters in host memory, where they are on CPUs anyway.

    Parameters
    ----------
    offload_params : bool, default False
    """

    offload_params: bool = False


@dataclass
class FullStateDictConfig:
    """Full tensors, on all ranks or on rank 0.

    Parameters
    ----------
    offload_to_cpu : bool, default False
    rank0_only : bool, default False
    """

    offload_to_cpu: bool = False
    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig:
    """This rank's pieces.

    Parameters
    ----------
    offload_to_cpu : bool, default False
    """

    offload_to_cpu: bool = False


class FullyShardedDataParallel(nn.Module):
    """Shard a module as FSDP1 does; its arguments, in its order.

    Parameters
    ----------
    module : nn.Module
    process_group : optional
        None: all ranks. Others are refused: give ``device_mesh``.
    sharding_strategy : ShardingStrategy, default FULL_SHARD
        torch's own enum is taken too.
    cpu_offload : CPUOffload, optional
        Is what happens anyway on CPUs.
    auto_wrap_policy : callable or policy, optional
        Of :mod:`fsdpc.torch.wrap` or ``torch.distributed.fsdp.wrap``.
    backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params
        Accepted: gathers follow the recorded order, parameters are the original ones always.
    mixed_precision : MixedPrecision, optional
    ignored_modules, ignored_states : iterable, optional
        Modules, or parameters, that are left alone.
    param_init_fn : callable, optional
        Called on every module with meta parameters before sharding.
    device_id : optional
        None or the CPU.
    sync_module_states : bool, default False
        Take rank 0's values.
    device_mesh : DeviceMesh, optional
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        if process_group is not None:
            raise NotImplementedError("process_group: give device_mesh, or none for all ranks")
        if device_id is not None and torch.device(device_id).type != "cpu":
            raise NotImplementedError(f"device_id={device_id}: only the CPU is supported")
        if isinstance(module, FSDPModule):
            raise ValueError(f"{type(module).__name__} is sharded already")
        ignored = _ignored(ignored_modules, ignored_states)
        if param_init_fn is not None:
            _materialize(module, param_init_fn)
        precision = mixed_precision or MixedPrecision()
        if getattr(precision, "keep_low_precision_grads", False):
            raise NotImplementedError("keep_low_precision_grads: gradients have the pieces' dtype")
        name = getattr(sharding_strategy, "name", "FULL_SHARD").lstrip("_")
        options: dict[str, Any] = {
            "mesh": device_mesh,
            "strategy": name,
            "sync_module_states": sync_module_states,
            "ignored_params": ignored,
        }
        if auto_wrap_policy is not None:
            inner = {**options, "mp_policy": _policy(precision, precision.cast_forward_inputs)}
            apply_policy(
                module, auto_wrap_policy, set(map(id, ignored)),
                lambda m: fully_shard(m, **inner),
            )  # fmt: skip
        root = precision.cast_forward_inputs or precision.cast_root_forward_inputs
        fully_shard(module, mp_policy=_policy(precision, root), **options)
        if precision.buffer_dtype is not None:
            _cast_buffers(module, precision.buffer_dtype)
        self.module = module
        self._kind, self._config = StateDictType.FULL_STATE_DICT, FullStateDictConfig()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names as the plain module has them."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names as the plain module has them."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the global norm; collective."""
        return clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside."""
        return self.module.no_sync()  # type: ignore[operator]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what :meth:`state_dict_type` says; full tensors at first; collective."""
        if self._kind is not StateDictType.FULL_STATE_DICT:
            return state_dict.local_state_dict(self.module, *args, **kwargs)
        if getattr(self._config, "rank0_only", False):
            return state_dict.get_model_state_dict(self.module, rank0_only=True)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take what :meth:`state_dict` returned: full tensors, or this rank's pieces.

        Parameters
        ----------
        state_dict : mapping of str to Tensor
        strict : bool, default True
        assign : bool, default False
        """
        if self._kind is not StateDictType.FULL_STATE_DICT:
            return nn.Module.load_state_dict(self.module, state_dict, strict=strict)
        return self.module.load_state_dict(state_dict, strict, assign)

    @staticmethod
    def summon_full_params(module: nn.Module, **options: Any) -> AbstractContextManager[None]:
        """Let parameters be private full copies; see :func:`fsdpc.torch.summon_full_params`."""
        return state_dict.summon_full_params(module, **options)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> tuple[Any, Any]:
        """Say what ``state_dict()`` returns from now on; returns what was said before."""
        before = (getattr(module, "_kind", None), getattr(module, "_config", None))
        for m in module.modules():
            if isinstance(m, FullyShardedDataParallel):
                m._kind = StateDictType[state_dict_type.name]
                m._config = state_dict_config or FullStateDictConfig()
        return before

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """Say what ``state_dict()`` returns inside."""
        kind, config = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            if kind is not None:
                FullyShardedDataParallel.set_state_dict_type(module, kind, config)

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: Any = None
    ) -> dict[str, Any]:
        """Return full optimizer states by parameter name; collective."""
        rank0 = getattr(getattr(model, "_config", None), "rank0_only", False)
        return optim_state.get_optimizer_state_dict(model, optim, rank0_only=rank0)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's part of full states, for ``optim.load_state_dict``."""
        names = {id(p): name for name, p in model.named_parameters()}
        order = [p for g in optim.param_groups for p in g["params"]]
        at = {names[id(p)]: (i, p) for i, p in enumerate(order)}
        states: dict[int, Any] = {}
        for name, values in optim_state_dict["state"].items():
            i, p = at[name]
            info = p.fsdpc
            states[i] = {
                key: optim_state.own_rows(info, p, v)
                if isinstance(v, torch.Tensor) and v.dim() and v.shape == info.shape
                else v
                for key, v in values.items()
            }
        groups = [
            {**g, "params": [at[n][0] for n in g["params"]]}
            for g in optim_state_dict["param_groups"]
        ]
        return {"state": states, "param_groups": groups}

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Return the sharded modules inside."""
        found = [m for m in module.modules() if isinstance(m, FSDPModule)]
        return found[:1] if root_only else found

    def check_is_root(self) -> bool:
        """Return whether this module began the units' root."""
        root: Root | None = self.module._fsdpc_state.root  # type: ignore[union-attr,assignment]
        return root is not None and root.head is self.module._fsdpc_state.door  # type: ignore[union-attr]


def _policy(precision: Any, cast_inputs: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, None, cast_inputs)


def _ignored(modules: Any, states: Any) -> list[nn.Parameter]:
    params = [p for m in modules or () for p in m.parameters()]
    for each in states or ():
        params += list(each.parameters()) if isinstance(each, nn.Module) else [each]
    return params


def _materialize(module: nn.Module, init: Callable[[nn.Module], None]) -> None:
    for m in module.modules():
        own = [*m.parameters(recurse=False), *m.buffers(recurse=False)]
        if any(t.is_meta for t in own):
            init(m)


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                m._buffers[name] = buffer.to(dtype)
