"""Ranks for a notebook: ``%load_ext fsdpc``, then ``%ranks 2``, and ``%%ranks`` on top of cells.

The ranks stay until ``%ranks stop``, so what one cell defines on them the next one finds.
docs/notebooks.md shows how to work with them.  IPython is needed, and imported here alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RankError", "load_ipython_extension", "unload_ipython_extension"]


class RankError(RuntimeError):
    """A cell failed on one or more ranks: docs/troubleshooting.md#exceptions.

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
        """Return what IPython shows instead of the frames of this process."""
        return self._lines


def load_ipython_extension(shell: Any) -> None:
    """Add the ``%ranks`` and ``%%ranks`` magics to an IPython shell; ``%load_ext fsdpc`` does."""
    from fsdpc.notebook._magics import RankMagics

    shell.register_magics(RankMagics)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks and take the magics away; ``%unload_ext fsdpc`` does."""
    magics = shell.magics_manager.registry.pop("RankMagics", None)
    if magics is not None:
        magics.stop()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("ranks", None)
