"""Read and write the full values of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdpc.nn.module import Module
from fsdpc.nn.parameter import full_tensor
from fsdpc.sharding.fsdp_module import FSDPModule


@contextmanager
def summon_full_params(
    module: Module, *, recurse: bool = True, writeback: bool = True
) -> Iterator[None]:
    """Replace each parameter with a private full copy in its original dtype; collective.

    Parameters
    ----------
    module : Module
        A module whose units, including those in submodules, are gathered.
    recurse : bool, default True
        If False, gather only the units of this module itself.
    writeback : bool, default True
        Whether each rank keeps its own rows of the copies, including changes, on exit. All ranks
        must write the same values. Skipped after an exception.

    Notes
    -----
    Every rank needs memory for a full copy of the parameters. The modules cannot be called inside.

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.fully_shard(fsdpc.nn.Linear(2, 1, bias=False))
    >>> with fsdpc.no_grad(), fsdpc.summon_full_params(layer):
    ...     _ = layer.weight.fill_(0.5)
    >>> fsdpc.full_tensor(layer.weight).tolist()
    [[0.5, 0.5]]
    """
    modules = [m for m in module.modules() if isinstance(m, FSDPModule)] if recurse else [module]
    params = [p for p in module.parameters() if p._unit is not None]
    units = {m._fsdpc_unit for m in modules if isinstance(m, FSDPModule)}
    params = [p for p in params if p._unit in units]
    for m in modules:
        if getattr(m, "_fsdpc_summoned", False):
            raise RuntimeError(f"summon_full_params() inside itself, on {type(m).__name__}")
    unsharded = [full_tensor(p) for p in params]
    for p, full in zip(params, unsharded, strict=True):
        p._unit.bind(p._index, full)
    for m in modules:
        m.__dict__["_fsdpc_summoned"] = True
    done = False
    try:
        yield
        done = True
    finally:
        for m in modules:
            m.__dict__.pop("_fsdpc_summoned", None)
        for p, full in zip(params, unsharded, strict=True):
            p._unit.bind(p._index, None)
            if done and writeback:
                p._unit.write(p._index, full)
