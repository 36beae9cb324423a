"""The error raised when a cell fails."""

from __future__ import annotations


class RankError(RuntimeError):
    """Raised when a cell fails on one or more ranks: docs/troubleshooting.md#exceptions.

    Attributes
    ----------
    tracebacks : dict of int to str
        Each failed rank's traceback, or how the rank ended.
    """

    def __init__(self, headline: str, lines: list[str], tracebacks: dict[int, str]) -> None:
        super().__init__(headline)
        self.tracebacks = tracebacks
        self._lines = lines

    def _render_traceback_(self) -> list[str]:
        """Return the traceback for IPython to show, without this process's frames."""
        return self._lines
