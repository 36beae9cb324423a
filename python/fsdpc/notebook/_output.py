"""Shows what the ranks print and display in one cell, without repeating identical output.

By default, the first rank's output appears as it arrives, and a final line reports whether the
other ranks printed the same. With ``--all``, every rank's output appears line by line, and each
line is prefixed with its ranks.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from fsdpc.launching.channel import Message
from fsdpc.launching.forked import name_ranks

LATE_S = 0.3  # how long a line waits for the same line from other ranks
ADDRESS = re.compile(r"\b0x[0-9a-f]+")  # an object's address in its repr


def write(text: str) -> None:
    """Print to the cell immediately."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show(shell: Any, message: Message) -> None:
    """Display an object from a rank in this process."""
    if message.get("clear"):
        shell.display_pub.clear_output(wait=message["wait"])
        return
    shell.display_pub.publish(
        data=message["data"],
        metadata=message["metadata"],
        transient=message["transient"],
        update=message["update"],
    )


def _compared(message: Message) -> str:
    """Return a key by which two ranks' displayed objects can be compared."""
    return ADDRESS.sub("0x", repr(sorted(message.get("data", {}).items())))


class _Said:
    """A digest of everything a rank prints and displays, except overwritten progress lines."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._line = ""
        self.is_empty = True

    def add(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line.rstrip("\r").rpartition("\r")[2])

    def show(self, message: Message) -> None:
        if not message.get("clear"):
            self._take(_compared(message))

    def digest(self) -> bytes:
        if self._line:
            self.add("\n")
        return self._digest.digest()

    def _take(self, text: str) -> None:
        self.is_empty = False
        self._digest.update(ADDRESS.sub("0x", text).encode() + b"\n")


class First:
    """Shows only the first rank's output, and finally whether the other ranks printed the same."""

    def __init__(self, ranks: Sequence[int], shell: Any) -> None:
        self._lead, self._shell = ranks[0], shell
        self._said = {rank: _Said() for rank in ranks}
        self._at_start = True

    def text(self, rank: int, text: str) -> None:
        if rank not in self._said:
            return
        self._said[rank].add(text)
        if rank == self._lead:
            write(text)
            self._at_start = text.endswith(("\n", "\r"))

    def show(self, rank: int, message: Message) -> None:
        if rank not in self._said:
            return
        self._said[rank].show(message)
        if rank == self._lead:
            show(self._shell, message)

    def tick(self) -> None: ...

    def close(self) -> None:
        """Write the final line if any other rank printed something."""
        digests = {rank: said.digest() for rank, said in self._said.items() if not said.is_empty}
        others = [rank for rank in digests if rank != self._lead]
        if not others:
            return
        same = [rank for rank in digests if digests[rank] == digests.get(self._lead)]
        different = [rank for rank in others if rank not in same]
        parts = [f"{name_ranks(same)}: the same output"] if len(same) > 1 else []
        if different:
            parts.append(f"{name_ranks(different)}: other output, shown by %%ranks --all")
        write(f"{'' if self._at_start else chr(10)}[{'; '.join(parts)}]\n")


class All:
    """Shows every rank's output line by line, merging lines that several ranks print."""

    def __init__(self, ranks: Sequence[int], shell: Any) -> None:
        self._shell = shell
        self._lines = dict.fromkeys(ranks, "")
        self._items: dict[int, deque[tuple[float, str, Message | None]]] = {
            rank: deque() for rank in ranks
        }

    def text(self, rank: int, text: str) -> None:
        if rank not in self._lines:
            return
        # A progress line that is rewritten appears only in its final state.
        *lines, self._lines[rank] = (self._lines[rank] + text).split("\n")
        self._lines[rank] = self._lines[rank][self._lines[rank].rfind("\r", 0, -1) + 1 :]
        now = time.monotonic()
        for line in lines:
            self._items[rank].append((now, line.rstrip("\r").rpartition("\r")[2], None))
        self._merge(now)

    def show(self, rank: int, message: Message) -> None:
        if rank in self._items and not message.get("clear"):
            self._items[rank].append((time.monotonic(), _compared(message), message))
            self._merge(time.monotonic())

    def tick(self) -> None:
        """Write lines that have waited long enough for other ranks to print them."""
        self._merge(time.monotonic())

    def close(self) -> None:
        """Write the remaining lines."""
        for rank, line in self._lines.items():
            if line:
                self.text(rank, "\n")
        self._merge(float("inf"))

    def _merge(self, now: float) -> None:
        """Write each rank's oldest item, merging identical items."""
        while waiting := [rank for rank, items in self._items.items() if items]:
            oldest = min(waiting, key=lambda rank: (self._items[rank][0][0], rank))
            since, text, message = self._items[oldest][0]
            everybody = len(waiting) == len(self._items)
            if not everybody and now - since < LATE_S:
                return
            first = waiting[0] if everybody else oldest
            _, text, message = self._items[first][0]
            same = [rank for rank in waiting if self._items[rank][0][1] == text]
            for rank in same:
                self._items[rank].popleft()
            label = f"[{name_ranks(same).partition(' ')[2]}]"
            write(f"{label} {text}\n" if message is None else f"{label}\n")
            if message is not None:
                show(self._shell, message)
