"""Check the torch version; this frontend imports this module first."""

from __future__ import annotations

import torch

OLDEST = (2, 5)


def torch_version() -> tuple[int, ...]:
    """Return torch's major and minor version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def check_torch() -> None:
    """Raise if torch is older than the oldest tested version.

    Raises
    ------
    ImportError
        The error names both versions.
    """
    if torch_version() < OLDEST:
        raise ImportError(
            f"fsdpc.torch needs torch {'.'.join(map(str, OLDEST))} or newer, found "
            f"{torch.__version__}: pip install -U torch; fsdpc itself runs without torch"
        )


check_torch()
