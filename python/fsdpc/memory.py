"""What this rank's memory is spent on."""

from __future__ import annotations

from fsdpc import _core, offload


def memory_stats() -> dict[str, int]:
    """Return bytes by category, now and at most.

    Returns
    -------
    dict of str to int
        ``<category>_bytes`` and ``<category>_peak_bytes`` for wire (counted on the host's first
        rank: there is one copy), master, grad, state, reduce, staging (what is on its way to and
        from a disk), pinned (host memory beside a GPU: what is offloaded there, and what is on its
        way), activation and other;
        ``total_bytes``, ``total_peak_bytes`` (without pinned), ``cached_bytes`` (free in host
        memory, kept for reuse) and ``system_allocs`` (times the system, or CUDA, was asked for
        memory: it does not grow in a steady step); of :class:`OffloadPolicy`'s files
        ``disk_file_bytes``, ``disk_read_bytes`` and ``disk_written_bytes``.

    Examples
    --------
    >>> import fsdpc
    >>> held = fsdpc.memory_stats()
    >>> held["total_bytes"] <= held["total_peak_bytes"]
    True
    """
    return {**_core.memory_stats(), **offload.file_stats()}
