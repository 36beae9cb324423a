"""Describe this installation and this machine."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np

from fsdpc import _core, distributed
from fsdpc._version import __version__
from fsdpc.distributed import hosts
from fsdpc.tensors import cuda


def show_config(print_: bool = True) -> dict[str, Any]:
    """Describe the build, the processor, and the features found at run time.

    Parameters
    ----------
    print_ : bool, default True
        Whether to print a table as well.

    Returns
    -------
    dict
        Values by name. Bitwise claims hold for equal ``isa``. ``cuda`` and ``nccl`` describe the
        GPUs and NCCL found, or why there are none; ``mpi`` lists the MPI families that it was built
        with. ``transport``, present after initialization, is how ranks communicate.

    Notes
    -----
    Starts NVIDIA's driver and opens NCCL if they are installed (:mod:`fsdpc.cuda`).

    Examples
    --------
    >>> import fsdpc
    >>> found = fsdpc.show_config(print_=False)
    >>> found["device"], found["initialized"]
    ('cpu', False)
    """
    config: dict[str, Any] = {
        "fsdpc": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        **_core.runtime_config(),
        "cuda": cuda.describe(),
        "nccl": cuda.describe_nccl(),
        "mpi": ", ".join(hosts.families()) or "none: built where no mpicc was found",
        "initialized": distributed.is_initialized(),
    }
    if distributed.is_initialized():
        world = distributed.world()
        config |= {"rank": distributed.rank(), "world_size": distributed.world_size(),
                   "transport": world.transport}
    if print_:
        width = max(map(len, config))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in config.items()))
    return config
