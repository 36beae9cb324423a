"""Signals that ask a run to stop: SIGTERM, and SIGUSR1 from schedulers before a time limit.

Signals reach ranks at different times, or reach only one rank. A handler therefore only records the
signal, and the ranks agree after each step whether to stop.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType

from fsdpc import distributed

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Signal handlers that record signals, so that the ranks can agree on them.

    Parameters
    ----------
    signals : iterable of signal.Signals, default SIGTERM and SIGUSR1

    Attributes
    ----------
    name : str
        Name of the signal at which the ranks agreed to stop; empty until then.

    Raises
    ------
    ValueError
        The caller is not the main thread, in which Python runs handlers.

    Notes
    -----
    :meth:`agree` is collective and costs one small all-reduce after each step.
    """

    def __init__(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        self.name: str = ""
        self._asked = 0
        self._before = {each: signal.signal(each, self._ask) for each in signals}

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = signum

    def agree(self) -> bool:
        """Return whether any rank was asked to stop; all ranks get the same result (collective)."""
        found = int(distributed.all_reduce(self._asked, "max"))
        self.name = signal.Signals(found).name if found else ""
        return bool(found)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
