"""Find the largest batch that fits, using ranks that are discarded afterwards.

A rank that runs out of memory inside a step leaves its peers in a collective that never ends, and
their shared state is lost. Each size is therefore tried in a separate world, which succeeds or
fails on all ranks together, even if the kernel kills one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdpc.launching.launcher import LaunchError, launch

# What a rank reports when it runs out of memory: an error from Python or torch, or the kernel's
# SIGKILL.
_SIGNS = re.compile(
    r"^(?:[\w.]*MemoryError\b|[\w.]*RuntimeError: .*(?:out of memory|n't allocate memory)"
    r"|killed by SIGKILL)",
    re.MULTILINE,
)


def find_batch_size(
    fn: Callable[[int], object],
    ranks: int,
    *,
    start: int = 1,
    limit: int = 1024,
    timeout: float | None = None,
) -> int:
    """Find the largest batch size that fits into memory on all ranks.

    Parameters
    ----------
    fn : callable
        ``fn(batch_size)`` builds the model and takes one or two steps, on every rank, as for
        :func:`fsdpc.launch`.
    ranks : int
        The number of ranks that will train.
    start : int, default 1
        First size to try; doubled until a size fails, then bisected.
    limit : int, default 1024
        Largest size to try.
    timeout : float, optional
        Timeout for each try in seconds; the call fails when it expires.

    Returns
    -------
    int

    Raises
    ------
    fsdpc.launcher.LaunchError
        A try failed for a reason other than memory.
    MemoryError
        Not even ``start`` fits.
    RuntimeError
        As for ``launch``: forking is unsafe here.

    Notes
    -----
    Call it before this process is a rank. A try counts as out of memory if the first failing rank
    raised MemoryError or torch's OutOfMemoryError, or was killed by SIGKILL, which Linux sends when
    memory is short. The result leaves no reserve for later steps that need more. For
    :mod:`fsdpc.nn` models, :func:`fsdpc.memory_plan` computes the answer without a try.

    Examples
    --------
    >>> def step(batch_size):
    ...     if batch_size > 5:
    ...         raise MemoryError
    >>> find_batch_size(step, 2, limit=64)
    5
    """
    if not 1 <= start <= limit:
        raise ValueError(f"start must be from 1 to the limit of {limit}, got {start}")

    def fits(size: int) -> bool:
        try:
            launch(fn, ranks, size, timeout=timeout)
        except LaunchError as error:
            if error.rank is None or not _SIGNS.search(error.tracebacks[error.rank]):
                raise
            return False
        return True

    if not fits(start):
        raise MemoryError(f"a batch of {start} does not fit on {ranks} ranks: see fsdpc.plan()")
    good, bad = start, limit + 1
    while good < limit and bad > limit:
        size = min(2 * good, limit)
        if fits(size):
            good = size
        else:
            bad = size
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
