"""Run ranks from a notebook: ``%load_ext fsdpc``, ``%ranks 2``, then ``%%ranks`` atop cells.

The ranks run until ``%ranks stop``, so a cell can use anything that earlier cells defined on them.
docs/notebooks.md shows how to work with them. Only this package imports IPython.
"""

from __future__ import annotations

from typing import Any

from fsdpc.notebook._error import RankError

__all__ = ["RankError", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Add the ``%ranks`` and ``%%ranks`` magics to a shell; called by ``%load_ext fsdpc``."""
    from fsdpc.notebook._magics import RankMagics

    shell.register_magics(RankMagics)


def unload_ipython_extension(shell: Any) -> None:
    """End the ranks and remove the magics; called by ``%unload_ext fsdpc``."""
    magics = shell.magics_manager.registry.pop("RankMagics", None)
    if magics is not None:
        magics.stop()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("ranks", None)
