"""Programs in a terminal, and what is seen there when they have ended."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios


def in_terminal(command: list[str], env: dict[str, str], columns: int = 80) -> tuple[int, str]:
    """Run a command in a terminal so wide; return its exit code and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # how the end of a terminal reads
                break
            seen += chunk
            if not chunk:
                break
    finally:
        os.close(ours)
        if process.poll() is None and not seen:
            process.kill()
    return process.wait(60), seen.decode()


def visible(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end: a carriage return overwrites."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return lines


def widest(written: str) -> int:
    """Return the length of the longest line, rewritten ones among them."""
    return max(len(line) for line in re.split(r"[\r\n]+", written))
