"""``DistributedDataParallel``: every rank has the whole model, and gradients are averaged."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdpc._shard import sharded_class
from fsdpc.fsdp_module import plain_class
from fsdpc.torch.fsdp1 import FullyShardedDataParallel

#: What torch's takes besides, and what means nothing here.
_ACCEPTED = frozenset({
    "batched_grad_copy", "broadcast_buffers", "bucket_cap_mb", "bucket_cap_mb_list",
    "check_reduction", "dim", "find_unused_parameters", "forward_sync_buffers",
    "gradient_as_bucket_view", "init_sync", "skip_all_reduce_unused_params", "static_graph",
})  # fmt: skip


class DistributedDataParallel(FullyShardedDataParallel):
    """Average gradients over ranks as torch's DDP does; collective.

    Parameters
    ----------
    module : nn.Module
        Is changed in place and returned; it takes rank 0's parameters and buffers.
    device_ids : list of int, torch.device or None, optional
        One device, where the module goes; on CPUs accepted.
    output_device : optional
        Accepted: outputs are where the module is.
    process_group : ProcessGroup, optional
        All ranks where not given.
    device_mesh : DeviceMesh, optional
        Of one dimension, in the place of a group.
    options
        Others of torch's: accepted where they say how gradients are sent (``bucket_cap_mb``,
        ``find_unused_parameters``, ``static_graph`` ...).

    Returns
    -------
    the same module

    Raises
    ------
    NotImplementedError
        ``mixed_precision`` or a delayed all-reduce is requested, or an option is unknown.

    Notes
    -----
    It is :class:`FullyShardedDataParallel` with NO_SHARD: make the optimizer after it. Names in
    state dicts are the plain module's, without ``module.``. A forward without gradients and
    ``state_dict()`` wait for nobody, so rank 0 may run them alone. Buffers are not sent again.

    Examples
    --------
    >>> import torch
    >>> from fsdpc.torch import DistributedDataParallel
    >>> model = DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model.weight.grad[0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

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
        refused = sorted(k for k, v in options.items() if k not in _ACCEPTED and v is not None)
        if refused:
            raise NotImplementedError(
                f"DistributedDataParallel({refused[0]}=...): leave it out; fully_shard(strategy="
                '"NO_SHARD", mp_policy=...) has precision'
            )
        ours = FullyShardedDataParallel(
            module,
            process_group,
            "NO_SHARD",
            device_id=device_ids[0] if device_ids else None,
            sync_module_states=True,
            device_mesh=device_mesh,
        )
        ours.__class__ = sharded_class(cls, plain_class(type(ours)), cls.__name__)
        return ours
