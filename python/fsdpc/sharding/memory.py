"""What this rank's memory is spent on."""

from __future__ import annotations

from fsdpc import _core
from fsdpc.sharding import offload


def memory_stats() -> dict[str, int]:
    """Return bytes by category, now and at most.

    Returns
    -------
    dict of str to int
        ``<category>_bytes`` and ``<category>_peak_bytes`` for wire (counted on the host's first
        rank: there is one copy), master, grad, state, reduce, staging (on its way to and from a
        disk), pinned (host memory beside a GPU: offloaded, or on its way), activation and other.
        ``total_bytes``, ``total_peak_bytes`` (without pinned) and ``cached_bytes`` (free in host
        memory, kept for reuse). ``system_allocs`` counts requests to the system, or CUDA, for
        memory: it does not grow in a steady step. ``disk_file_bytes``, ``disk_read_bytes`` and
        ``disk_written_bytes`` are of :class:`OffloadPolicy`'s files.

    Examples
    --------
    >>> import fsdpc
    >>> held = fsdpc.memory_stats()
    >>> held["total_bytes"] <= held["total_peak_bytes"]
    True
    """
    return {**_core.memory_stats(), **offload.file_stats()}
