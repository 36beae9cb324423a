"""``DistributedDataParallel``: every rank has the whole model, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from fsdpc.sharding.fsdp_module import plain_class
from fsdpc.sharding.rules import sharded_class
from fsdpc.torch import _compiled, _made_before, fsdp1
from fsdpc.torch.fsdp1 import FullyShardedDataParallel
from fsdpc.torch.state_dict import sync_buffers

#: torch's options about how gradients are sent, which do not affect results.
_ACCEPTED = frozenset({
    "batched_grad_copy", "bucket_cap_mb", "bucket_cap_mb_list", "check_reduction", "dim",
    "find_unused_parameters", "gradient_as_bucket_view", "skip_all_reduce_unused_params",
    "static_graph",
})  # fmt: skip


class DistributedDataParallel(FullyShardedDataParallel):
    """Average gradients over ranks as torch's DDP does; collective.

    Parameters
    ----------
    module : nn.Module
        Modified in place and returned; it gets rank 0's parameters and buffers.
    device_ids : list of int, torch.device or None, optional
        One device, to which the module moves; has no effect on CPUs.
    output_device : optional
        Accepted, but outputs stay on the module's device.
    process_group : ProcessGroup, optional
        All ranks by default.
    device_mesh : DeviceMesh, optional
        A one-dimensional mesh, instead of a group.
    broadcast_buffers : bool, optional
        If False, buffers are never sent, not even at construction; see ``forward_sync_buffers``.
    forward_sync_buffers : bool, default True
        Send rank 0's buffers when torch's DDP does: before the first forward, and before any
        forward after a forward with gradients outside ``no_sync()``.
    init_sync : bool, default True
        If False, each rank keeps its own values, which must be equal.
    options
        Other options of torch's DDP, which are accepted if they affect only how gradients are sent
        (``bucket_cap_mb``, ``find_unused_parameters``, ``static_graph`` ...).

    Returns
    -------
    the same module

    Raises
    ------
    NotImplementedError
        ``mixed_precision`` or a delayed all-reduce is requested, or an option is unknown.
    ValueError
        There are several ``device_ids``, or there is a SyncBatchNorm on CPUs.

    Notes
    -----
    This is :class:`FullyShardedDataParallel` with NO_SHARD, so it replaces parameter objects. An
    existing ``torch.optim`` optimizer switches to the new ones and keeps its states. State dicts
    use the plain module's names, without ``module.``. Rank 0 may run ``state_dict()`` and forwards
    without gradients by itself. If the model has buffers, it must run these forwards with
    ``model.module``, because the first forward of ``model`` after a training step sends buffers.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import DistributedDataParallel
    >>> model = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model.weight.grad[0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    _has_buffers: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool

    def __new__(
        cls,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *,
        process_group: Any = None,
        device_mesh: Any = None,
        **options: Any,
    ) -> Any:
        at_init, at_forward, synced = _when_buffers_are_sent(options)
        refused = sorted(k for k, v in options.items() if k not in _ACCEPTED and v is not None)
        if refused:
            raise NotImplementedError(
                f"DistributedDataParallel({refused[0]}=...): leave it out; fully_shard(strategy="
                '"NO_SHARD", mp_policy=...) has precision'
            )
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(
                f"device_ids can only be None or contain a single element, got {device_ids}"
            )
        fsdp1._move(module, device_ids[0] if device_ids else None)
        _refuse_sync_batch_norm(module)
        places = _made_before.places_of(module)
        made = _made_before.optimizers_over(places)
        left = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        fsdp1._shard(
            module,
            {
                "sharding_strategy": "NO_SHARD",
                "mixed_precision": None,
                "param_init_fn": None,
                "sync_module_states": synced,
                "process_group": process_group,
                "device_mesh": device_mesh,
                "cpu_offload": None,
                "kept_buffers": [b for n, b in module.named_buffers() if not at_init or n in left],
            },
            [p for n, p in module.named_parameters() if n in left],
            outer=True,
        )
        for optimizer in made:
            _made_before.give_whole(optimizer, places)
        ours: Any = module
        ours.__class__ = sharded_class(cls, plain_class(type(module)), prefix=cls.__name__)
        ours.forward_sync_buffers = at_forward
        ours.require_forward_param_sync = True
        ours._has_buffers = bool(_buffers_of(ours))
        return ours

    @property
    def broadcast_buffers(self) -> bool:
        """Whether forwards broadcast buffers; torch's older name for ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Ignore recomputations, and forwards on a rank's private copies.
        counts = torch._C._current_graph_task_id() == -1 and not self._fsdpc_state.summoned
        if counts:
            self._sync_buffers()
        result = super().__call__(*args, **kwargs)
        if counts:
            self.require_forward_param_sync = (
                torch.is_grad_enabled() and self._fsdpc_unit.requires_sync
            )
        return result

    def _sync_buffers(self) -> None:
        """Broadcast rank 0's buffers if a synced forward has changed them."""
        due = self.require_forward_param_sync and self.forward_sync_buffers
        if due and self._has_buffers:  # decided at construction, as in torch
            sync_buffers(self._fsdpc_state, _buffers_of(self))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Freeze the weights and buffers; see :meth:`fsdpc.torch.FSDPModule.hold`."""
        self._sync_buffers()  # now, since numbers of forwards inside may differ between ranks
        self.require_forward_param_sync = False
        with super().hold():
            yield

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> NoReturn:
        """Raise an error, because all ranks must run the same number of steps."""
        raise NotImplementedError(_NO_JOIN)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Raise an error, as :meth:`join` does; ``torch.distributed.algorithms.Join`` calls it."""
        raise NotImplementedError(_NO_JOIN)


_NO_JOIN = (
    "DistributedDataParallel.join: ranks take equal numbers of steps here, because a rank without "
    "inputs has no forward to take part in. Give all ranks equally many batches "
    "(DistributedSampler does), or stop all ranks when one has none left (fsdpc.all_reduce)"
)

_compiled.leave_out(DistributedDataParallel.__call__)
_compiled.leave_out(DistributedDataParallel._sync_buffers, inside=True)


def _buffers_of(module: Any) -> list[torch.Tensor]:
    """Return the buffers to broadcast in forwards; modules may replace them between calls."""
    left = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [buffer for name, buffer in module.named_buffers() if name not in left]


def _when_buffers_are_sent(options: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Convert torch's options to whether construction and forwards broadcast buffers."""
    synced = bool(options.pop("init_sync", True))
    older, forward = (
        options.pop("broadcast_buffers", None),
        options.pop("forward_sync_buffers", None),
    )
    if forward is not None:  # as in torch, the older option is ignored in this case
        return synced, bool(forward), synced
    sent = older is None or bool(older)
    return synced and sent, sent, synced


def _refuse_sync_batch_norm(module: nn.Module) -> None:
    """Raise as torch's DDP does, because SyncBatchNorm has kernels only for accelerators."""
    for name, m in module.named_modules():
        at = {t.device.type for t in (*m.parameters(False), *m.buffers(False))}
        if isinstance(m, nn.SyncBatchNorm) and "cpu" in at:
            raise ValueError(
                f"SyncBatchNorm layers only work with GPU modules: '{name}' is on CPUs. Use "
                "BatchNorm, whose statistics are each rank's, or fsdpc.nn.SyncBatchNorm in a "
                "native model"
            )
