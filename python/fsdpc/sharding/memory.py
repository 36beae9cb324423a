"""This rank's memory use by category."""

from __future__ import annotations

from fsdpc import _core
from fsdpc.sharding import offload


def memory_stats() -> dict[str, int]:
    """Return bytes by category, current and peak.

    Returns
    -------
    dict of str to int
        ``<category>_bytes`` and ``<category>_peak_bytes`` for unsharded (one copy, counted on the
        host's first rank), master, grad, state, reduce, staging (in transit to and from a disk),
        pinned (host memory next to a GPU: offloaded, or in transit), activation and other.
        ``total_bytes`` and ``total_peak_bytes`` exclude pinned. ``cached_bytes`` is free host
        memory kept for reuse. ``system_allocs`` counts allocations from the system or CUDA, which
        stop growing in a steady state. ``disk_file_bytes``, ``disk_read_bytes`` and
        ``disk_written_bytes`` refer to the files of :class:`OffloadPolicy`.

    Examples
    --------
    >>> import fsdpc
    >>> held = fsdpc.memory_stats()
    >>> held["total_bytes"] <= held["total_peak_bytes"]
    True
    """
    return {**_core.memory_stats(), **offload.file_stats()}
