"""Signals that ask a run to stop: SIGTERM, and the schedulers' SIGUSR1 before a time limit.

Signals reach ranks at different times, or only one rank. A handler therefore only notes its signal,
and the ranks agree after each step whether it was the last one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType

from fsdpc import distributed

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Handlers that note signals, and the ranks' agreement about them.

    Parameters
    ----------
    signals : iterable of signal.Signals, default SIGTERM and SIGUSR1

    Attributes
    ----------
    name : str
        The signal that the ranks agreed to stop at; empty until then.

    Raises
    ------
    ValueError
        The caller is not the main thread, where Python runs handlers.

    Notes
    -----
    :meth:`agree` is collective: one small all-reduce after each step.
    """

    def __init__(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        self.name: str = ""
        self._asked = 0
        self._before = {each: signal.signal(each, self._ask) for each in signals}

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = signum

    def agree(self) -> bool:
        """Return whether any rank was asked to stop; collective, and the same on all ranks."""
        found = int(distributed.all_reduce(self._asked, "max"))
        self.name = signal.Signals(found).name if found else ""
        return bool(found)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
