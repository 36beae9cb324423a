"""What this rank uses its memory for."""

from __future__ import annotations

from fsdpc import _core
from fsdpc.sharding import offload


def memory_stats() -> dict[str, int]:
    """Return bytes by category, current and peak.

    Returns
    -------
    dict of str to int
        ``<category>_bytes`` and ``<category>_peak_bytes`` for wire (counted on the host's first
        rank, since there is one copy), master, grad, state, reduce, staging (in transit to and from
        a disk), pinned (host memory next to a GPU: offloaded, or in transit), activation and other.
        ``total_bytes`` and ``total_peak_bytes`` exclude pinned. ``cached_bytes`` is free host
        memory kept for reuse. ``system_allocs`` counts allocations from the system or CUDA; it does
        not grow in a steady step. ``disk_file_bytes``, ``disk_read_bytes`` and
        ``disk_written_bytes`` belong to the files of :class:`OffloadPolicy`.

    Examples
    --------
    >>> import fsdpc
    >>> held = fsdpc.memory_stats()
    >>> held["total_bytes"] <= held["total_peak_bytes"]
    True
    """
    return {**_core.memory_stats(), **offload.file_stats()}
