"""How busy this machine is, so that limits of time can allow for what else runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType

EVERY_S = 0.02


class Load:
    """Counts, while the block runs, the threads that run or wait for a processor."""

    def __enter__(self) -> Load:
        self._counts: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _count(self) -> None:
        while not self._over.wait(EVERY_S):
            line = next(
                line for line in Path("/proc/stat").read_text().splitlines() if "running" in line
            )
            self._counts.append((time.monotonic(), int(line.split()[1])))

    def slowness(self, begin: float, end: float) -> float:
        """How many shared a processor between two readings of time.monotonic; at least 1."""
        then = [count for at, count in self._counts if begin <= at <= end + EVERY_S]
        return max(1.0, sum(then) / len(then) / (os.cpu_count() or 1)) if then else 1.0
