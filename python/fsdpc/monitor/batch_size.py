"""The largest batch that fits, found on ranks that are thrown away.

A rank that runs out of memory inside a step leaves its peers in a collective that never ends, and
what they know of each other is lost. So each size is tried by a world of its own: it ends on all
ranks, or it fails for all, also where the kernel killed one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdpc.launching.launcher import LaunchError, launch

# How a rank without memory ends: Python's and torch's errors, and the kernel's choice.
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
    """Find the largest batch size that all ranks have memory for.

    Parameters
    ----------
    fn : callable
        ``fn(batch_size)`` builds the model and takes a step or two, on every rank, as what
        :func:`fsdpc.launch` is given.
    ranks : int
        As many as will train.
    start : int, default 1
        Tried first; doubled until a size fails, then halved in between.
    limit : int, default 1024
        Largest size to try.
    timeout : float, optional
        Seconds of one try, after which the call fails.

    Returns
    -------
    int

    Raises
    ------
    fsdpc.launcher.LaunchError
        A try failed for another reason than memory.
    MemoryError
        Not even ``start`` fits.
    RuntimeError
        As of ``launch``: a fork would be unsafe here.

    Notes
    -----
    Call it before this process is a rank. A try has failed on all ranks if the first that failed
    raised MemoryError or torch's OutOfMemoryError, or was killed by SIGKILL, as Linux does when
    memory is short. Sizes that fit leave nothing to spare for what a later step needs more.
    For models of :mod:`fsdpc.nn` :func:`fsdpc.memory_plan` tells it without a try.

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
