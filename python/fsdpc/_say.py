"""Lines on stderr, as the library's own."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write a line that names fsdpc; nowhere where there is no stderr, as in a daemon."""
    if sys.stderr is not None:
        sys.stderr.write(f"fsdpc: {text}\n")
        sys.stderr.flush()
