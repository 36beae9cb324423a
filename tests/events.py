"""The events of the engine's trace, counted."""

from __future__ import annotations

from collections import Counter

from fsdpc import _core


def event_counts() -> Counter[str]:
    """Return the events that the ring keeps since the last reset, by kind."""
    return Counter(kind for kind, *_ in _core.trace_events())
