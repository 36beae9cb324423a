"""A terminal whose last line is rewritten, while all other output is printed above it.

Programs show progress as a line that ends in a carriage return, then overwrite it. Other output
would break that line. A :class:`Screen` handles both: it clears the line, prints the output and
redraws the line below. :func:`rank_lines` does this for a launcher's ranks, and :func:`above`
for this process's ``sys.stdout`` and ``sys.stderr``.

A rank writes its progress line to a pipe, again with a carriage return, and the launcher draws it.
Text that bypasses Python (written to descriptors 1 and 2) appears above the line only if a launcher
prints it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

PIECES = re.compile(r"[^\r\n]*[\r\n]|[^\r\n]+")


def columns(stream: TextIO) -> int:
    """Return the width of a terminal in characters, or 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


class Screen:
    """A stream whose last line can be rewritten, with other text printed above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._line = ""
        self._drawn = 0  # characters of the line on the terminal
        self._at_start = True  # no unfinished line above
        self._lock = threading.RLock()  # a signal handler may print

    def show(self, line: str) -> None:
        """Rewrite the last line; an empty text clears it."""
        self.update("", line)

    def update(self, text: str, line: str) -> None:
        """Print ``text`` above the last line, and replace that line with ``line``."""
        with self._lock:
            self._line = line
            cleared = self._clear() + self._above(text) if text else ""
            self._put(cleared + self._draw())

    def print(self, text: str, stream: TextIO) -> None:
        """Print text above the last line, through another stream of the same terminal."""
        with self._lock:
            self._put(self._clear())
            stream.write(self._above(text))
            stream.flush()
            self._put(self._draw())

    def close(self) -> None:
        """Keep the last line, and continue on the next one."""
        with self._lock:
            if self._drawn:
                self._put(self._line[: self._width()] + "\n")
            self._line, self._drawn = "", 0

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _above(self, text: str) -> str:
        if text:
            self._at_start = text.endswith("\n")
        return text

    def _width(self) -> int:
        return columns(self._stream) - 1 if self._is_terminal else len(self._line)

    def _clear(self) -> str:
        """Return text that clears the line, or "" if the stream is not a terminal."""
        drawn, self._drawn = self._drawn, 0
        return " " * drawn + "\r" if drawn and self._is_terminal else ""

    def _draw(self) -> str:
        """Return text that draws the line and moves to its start, or "" after unfinished output."""
        if not self._at_start:
            return ""
        shown, before = self._line[: self._width()], self._drawn
        self._drawn = len(shown)
        return shown.ljust(before) + "\r" if shown or before else ""


class _Above:
    """A replacement for ``sys.stdout`` or ``sys.stderr`` on the same terminal as a screen."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen, self._stream = screen, stream

    def write(self, text: str) -> int:
        self._screen.print(text, self._stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def above(screen: Screen) -> Iterator[None]:
    """Make prints appear above the last line of a ``sys.stdout`` screen; close it at the end."""
    before = sys.stdout, sys.stderr
    alike = sys.stderr is not None and sys.stderr.isatty() == sys.stdout.isatty()
    sys.stdout = _Above(screen, sys.stdout)
    if alike:
        sys.stderr = _Above(screen, sys.stderr)
    try:
        yield
    finally:
        screen.close()
        sys.stdout, sys.stderr = before


@contextmanager
def rank_lines() -> Iterator[Callable[[str], object]]:
    """Yield a function that prints ranks' lines, each prefixed with the rank.

    On a terminal, a line that ends in a carriage return stays at the bottom until its rank writes
    again. Elsewhere the text is printed unchanged.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        yield _print
        return
    screen, owner, line = Screen(sys.stdout), "", ""

    def write(text: str) -> None:
        nonlocal owner, line
        rank, finished = text.partition("]")[0], ""
        for piece in PIECES.findall(text):
            if piece.endswith("\r"):
                owner, line = rank, piece[:-1] if piece.partition("]")[2].strip() else ""
                continue
            finished += piece
            if rank == owner:
                owner, line = "", ""
        screen.update(finished, line)

    try:
        yield write
    finally:
        screen.close()


def _print(text: str) -> None:
    if sys.stdout is not None:  # None in a daemon
        sys.stdout.write(text)
        sys.stdout.flush()
