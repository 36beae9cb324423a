"""This process's rank, and collectives on user values.

Ranks come from torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), which ``fsdpc run`` and ``launch`` set too. :func:`init` derives it from the variables
of ``srun`` or ``mpirun``, or from its arguments. If none of these is available, the world has a
single rank. Ranks on a host share memory; no port is opened and nothing is left behind. With GPUs
(:func:`fsdpc.set_default_device`), a rank uses the GPU of its LOCAL_RANK, or shares a GPU if there
are too few. NCCL transfers data between GPUs; ranks that share a GPU need NCCL 2.30 or newer.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fsdpc import _core
from fsdpc._core import Tensor
from fsdpc.distributed import carriers, environment, watch
from fsdpc.distributed.environment import (
    adopt_scheduler,
    find_mpi,
    inherited_socket,
    refuse_contradictions,
    run_address,
)

V = TypeVar("V")

_world: _core.Comm | None = None
_met: list[_core.Comm] = []  # groups that joined separately; left together with the world
_join_torch: Callable[[], bool] | None = None  # by torch's process group; set by fsdpc.torch
_local_rank = 0
_deterministic = False


def _environment_int(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set, but RANK or WORLD_SIZE is: set all or none")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got '{text}'") from None


def init(
    rank: int | None = None, world_size: int | None = None, *, deterministic: bool = False
) -> None:
    """Join the other ranks; call this once on every rank.

    Parameters
    ----------
    rank, world_size : int, optional
        This process's rank and the number of ranks; by default from the environment or, if it does
        not specify them, a world of one.
    deterministic : bool, default False
        Whether to sum micro-steps in the same tree as ranks. The result then depends only on the
        list of micro-batches, not on how it is split over ranks and accumulation. On several hosts,
        and over shard groups of a hybrid mesh, this holds for powers of two; otherwise rank 0
        warns. In fp16, or if the number of micro-steps is not a power of two, do not divide the
        loss: dividing it rounds each gradient. Instead call ``set_gradient_divide_factor`` with the
        number of micro-steps times the number of ranks. Every micro-step is reduced; ``no_sync()``
        only hides the result until a later micro-step. On a GPU, attention uses cuDNN's
        deterministic backward, which is three times slower.

    Raises
    ------
    ValueError
        rank or world_size is out of range, or two launchers have set different ones.
    RuntimeError
        This process has already joined.
    TimeoutError
        A rank did not arrive within ``FSDPC_TIMEOUT_S``; the message names it.
    NotImplementedError
        Ranks are on several hosts without a transport between them. Or several ranks are on GPUs
        and NCCL was not found (the message lists where it was searched), or ranks share a GPU and
        NCCL is older than 2.30.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.init()  # nothing started other ranks: a world of one
    >>> fsdpc.is_initialized(), fsdpc.rank(), fsdpc.world_size()
    (True, 0, 1)
    >>> fsdpc.shutdown()
    """
    global _world, _local_rank, _deterministic
    if _world is not None:
        raise RuntimeError(
            f"already initialised as rank {_world.rank} of {_world.size}; call shutdown() first"
        )
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if world_size is None or world_size > 1:
        adopt_scheduler(os.environ)
    given, named = rank is not None, "RANK" in os.environ or "WORLD_SIZE" in os.environ
    if rank is None or world_size is None:
        refuse_contradictions(os.environ)
        rank = _environment_int("RANK", None if named else 0)
        world_size = _environment_int("WORLD_SIZE", None if named else 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world size {world_size}: must be 0 <= rank < world_size")
    local_size = _environment_int("LOCAL_WORLD_SIZE", world_size)
    _local_rank = _environment_int("LOCAL_RANK", rank % max(local_size, 1))
    hosts = _hosts(rank, world_size, _local_rank, local_size)
    # Use torch's process group to connect several hosts, or ranks that no launcher numbered.
    if given or named and hosts == 1 or _join_torch is None or not _join_torch():
        _world = _meet(rank, world_size, hosts)
    _deterministic = bool(deterministic)
    _core.set_ordered(_deterministic)


def _meet(rank: int, world_size: int, hosts: int) -> _core.Comm:
    """Join the other ranks, using the rank from the environment or from :func:`init`."""
    address, secret = run_address(os.environ)
    listening = inherited_socket(address, rank)
    news = _environment_int("FSDPC_NEWS_FD", -1)
    if (world_size == 1 or hosts > 1) and listening >= 0:
        os.close(listening)  # no peer to meet, or another name is used: a pretended host
        listening = news = -1
    comm = _core.Comm(
        rank,
        world_size,
        address,
        socket_fd=listening,
        news_fd=news,
        local_rank=_local_rank,
        library=os.environ.get("FSDPC_NCCL_LIB") or None,
        secret=secret,
        hosts=hosts,
        transport=_transport(rank, world_size, hosts) if hosts > 1 else None,
    )
    if hosts > 1:
        watch.start(comm, hosts)
    return comm


def _hosts(rank: int, world_size: int, local_rank: int, local_size: int) -> int:
    """Compute the number of hosts from the launcher's variables."""
    said = f"RANK {rank}, WORLD_SIZE {world_size}, LOCAL_RANK {local_rank}, "
    said += f"LOCAL_WORLD_SIZE {local_size}"
    if not 0 <= local_rank < local_size:
        raise ValueError(f"{said}: LOCAL_RANK must be from 0 to LOCAL_WORLD_SIZE - 1")
    if world_size % local_size:
        raise NotImplementedError(f"{said}: every host must have the same number of ranks")
    if rank % local_size != local_rank:
        raise NotImplementedError(
            f"{said}: ranks of a host must follow each other (mpirun --map-by slot, "
            "srun --distribution=block)"
        )
    return world_size // local_size


def _transport(rank: int, world_size: int, hosts: int) -> _core.Transport:
    """Return the transport between hosts, which uses the MPI that started the ranks."""
    if environment.pretended_host is not None:
        from fsdpc.distributed import pretend

        return pretend.carry(rank, world_size, run_address(os.environ)[0])
    families = find_mpi(os.environ, world_size)
    paths = [Path(_core.__file__).with_name(f"libfsdpc_mpi_{name}.so") for name in families]
    for path in paths:
        if path.exists():
            return _core.Transport(rank, world_size, str(path))
    missing = "nothing here carries bytes between them"
    if paths:
        missing = f"there is no {' or '.join(path.name for path in paths)}"
    raise NotImplementedError(
        f"{world_size} ranks on {hosts} hosts, and {missing}: start them by the mpirun of an MPI "
        "whose mpicc was there when fsdpc was installed, or use fsdpc.torch after "
        "torch.distributed.init_process_group()"
    )


def world() -> _core.Comm:
    """Return the communicator of all ranks, joining them first if :func:`init` was not called.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.distributed.world().size
    1
    """
    if _world is None:
        init()
    assert _world is not None
    return _world


@atexit.register
def shutdown() -> None:
    """Leave the world without waiting for other ranks.

    Models sharded in this world can no longer be used.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.init()
    >>> fsdpc.shutdown()
    >>> fsdpc.is_initialized()
    False
    """
    global _world, _deterministic
    for comm in (_world, *_met):
        if comm is not None:
            comm.close()
    for leave in carriers.leaving:
        leave()
    _met.clear()
    carriers.leaving.clear()
    _world, _deterministic = None, False
    _core.set_ordered(False)


def is_deterministic() -> bool:
    """Return whether :func:`init` enabled deterministic mode.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.init(deterministic=True)
    >>> fsdpc.distributed.is_deterministic()
    True
    """
    return _deterministic


def is_initialized() -> bool:
    """Return whether this process has joined the other ranks.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.is_initialized()
    False
    """
    return _world is not None


def rank() -> int:
    """Return this process's rank in the world.

    Examples
    --------
    >>> import fsdpc
    >>> if fsdpc.rank() == 0:
    ...     print("once, not on every rank")
    once, not on every rank
    """
    return world().rank


def world_size() -> int:
    """Return the number of ranks.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.world_size()
    1
    """
    return world().size


def local_rank() -> int:
    """Return this process's local rank on its host.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.local_rank()
    0
    """
    world()
    return _local_rank


def _as_tensor(value: Any, floating: bool = False) -> Tensor:
    """Copy a user's value; raise before any communication if it cannot be sent."""
    if isinstance(value, Tensor):
        tensor = value.detach().clone()
    elif isinstance(value, (np.ndarray, np.generic, float, int)):
        tensor = _core.tensor(np.array(value, ndmin=0, copy=True))
    else:
        raise TypeError(
            f"give a Tensor, a NumPy array, a float or an int; got {type(value).__name__}"
        )
    if floating and not tensor.dtype.is_floating_point:
        raise TypeError(f"the mean of {tensor.dtype.name} values: give floats, or use op='sum'")
    return tensor


def _like(result: Tensor, value: V) -> V:
    if isinstance(value, Tensor):
        return result  # type: ignore[return-value]
    array = result.numpy()
    if isinstance(value, np.ndarray):
        return array  # type: ignore[return-value]
    return type(value)(array.reshape(()).item())  # type: ignore[call-arg]


def all_reduce(value: V, op: str = "sum") -> V:
    """Combine one value from each rank; the result is bitwise identical on all ranks.

    Parameters
    ----------
    value : Tensor, ndarray, float or int
        Must have the same shape and dtype on all ranks.
    op : {"sum", "mean", "max", "min"}

    Returns
    -------
    the type of ``value``
        A new object. Float sums use a fixed pairwise tree over ranks, in at least float32.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.all_reduce(2.5), fsdpc.all_reduce(2.5, "mean")  # a world of one
    (2.5, 2.5)
    """
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"op must be sum, mean, max or min, got '{op}'")
    tensor = _as_tensor(value, floating=op == "mean")
    world().all_reduce(tensor, "sum" if op == "mean" else op)
    if op == "mean":
        tensor = tensor / world_size()
    return _like(tensor, value)


def all_gather(value: Any) -> Any:
    """Collect one value from each rank, in rank order.

    Parameters
    ----------
    value : Tensor, ndarray, float or int
        Must have the same shape and dtype on all ranks.

    Returns
    -------
    Tensor or ndarray, (world_size, \\*shape)
        A Tensor if ``value`` is one, otherwise an array.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.all_gather(2.5)  # a world of one
    array([2.5])
    """
    result = world().all_gather(_as_tensor(value))
    return result if isinstance(value, Tensor) else result.numpy()


def broadcast(value: V, root: int = 0) -> V:
    """Send ``root``'s value to every rank; shape and dtype must be the same on all ranks.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.broadcast(2.5, root=0)
    2.5
    """
    if not 0 <= root < world_size():
        raise ValueError(f"root {root} of world size {world_size()}")
    tensor = _as_tensor(value)
    world().broadcast(tensor, root)
    return _like(tensor, value)


def barrier() -> None:
    """Wait until every rank has reached this call.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.barrier()
    """
    world().barrier()
