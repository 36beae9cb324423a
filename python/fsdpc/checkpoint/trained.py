"""Checkpoints of what training changes, without the frozen parameters of a base model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc.checkpoint.shards import Held, Shard, parameter_shard, shards_of


class Trained:
    """A model as checkpoints see it without its frozen parameters, as with adapters.

    Pass it as the ``"model"`` of :func:`fsdpc.checkpoint.save` and :func:`fsdpc.checkpoint.load`.
    The checkpoint has the parameters that require gradients, the buffers, and a checksum of the
    frozen parameters; a load into a model whose frozen parameters differ is refused.

    Parameters
    ----------
    model : Module
        Native or torch's, sharded or not; its frozen parameters have their values already when a
        checkpoint is loaded. Scales of frozen codes belong to them.

    Raises
    ------
    TypeError
        It is not a module that a checkpoint can hold.
    RuntimeError
        At a save or load: a frozen parameter has no values yet.

    Examples
    --------
    >>> import tempfile
    >>> from fsdpc import checkpoint, nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> _ = model[0].requires_grad_(False)
    >>> folder = tempfile.TemporaryDirectory()
    >>> checkpoint.save(folder.name + "/step-1", {"model": checkpoint.Trained(model)})
    >>> [t.name for t in checkpoint.inspect(folder.name + "/step-1").tensors]
    ['1.bias', '1.weight']
    """

    def __init__(self, model: Any) -> None:
        if shards_of.dispatch(type(model)) is shards_of.dispatch(object):
            raise TypeError(
                f"Trained takes a module of fsdpc.nn, got {type(model).__name__}; torch modules "
                "can be held once fsdpc.torch is imported"
            )
        self.model: Any = model

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield all parameters by dotted name, as optimizers and averages may list frozen ones."""
        return self.model.named_parameters()

    def base_crc(self) -> int:
        """Return a checksum of the frozen parameters; collective for a sharded model."""
        return _crc(shard for shard in shards_of(self.model, False).shards if shard.frozen)


@shards_of.register
def _(trained: Trained, write: bool) -> Held:
    for name, p in trained.named_parameters():
        if not p.requires_grad and getattr(p, "is_deferred", False):
            raise RuntimeError(
                f"frozen parameter '{name}' is deferred: the base needs its values before a "
                "checkpoint of what was trained over it is saved or loaded"
            )
    held = shards_of(trained.model, write)
    shards = [shard for shard in held.shards if not shard.frozen]
    names = {shard.name for shard in shards}
    aliases = {name: first for name, first in held.aliases.items() if first in names}
    return Held(shards, aliases, held.units, held.loaded, trained.base_crc)


def parameters_crc(named: Iterable[tuple[str, Any]]) -> int:
    """Return the CRC-32C of parameters in the order of their names; collective if sharded.

    Floats count in fp32, bytes as they are. The result is the same for any number of ranks.
    """
    return _crc(parameter_shard(name, p, False) for name, p in named)


def _crc(shards: Iterable[Shard]) -> int:
    crc = 0
    for shard in sorted(shards, key=attrgetter("name")):
        is_float = shard.memory.dtype.is_floating_point
        bits = (shard.memory.to(_core.float32) if is_float else shard.memory).bits()
        mine = [shard.replica, shard.first, bits.nbytes, _core.crc32c(0, bits)]
        every = distributed.all_gather(np.array(mine, np.int64)).tolist()
        for copy, _, size, part in sorted(map(tuple, every)):
            if copy == 0 and size:
                crc = _core.crc32c_combine(crc, part, size)
    return crc
