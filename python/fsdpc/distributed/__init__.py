"""Joining and leaving the world, collectives on user values, and launchers' variables."""

from fsdpc.distributed.group import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    init,
    is_deterministic,
    is_initialized,
    local_rank,
    rank,
    shutdown,
    world,
    world_size,
)

__all__ = [
    "all_gather", "all_reduce", "barrier", "broadcast", "init", "is_deterministic",
    "is_initialized", "local_rank", "rank", "shutdown", "world", "world_size",
]  # fmt: skip
