"""The hops of a program through csrc, by gdb: each call from one C file into another, once.

    gdb -q -batch -x tools/hops.py --args python script.py

The script calls ``os.getppid()`` twice: before and after the part to follow. HOPS names the
folders of csrc to follow, "py engine" if unset. docs/tour.md was checked with it.
"""

from __future__ import annotations

import os
import re
from typing import Any

import gdb

FOLDERS = os.environ.get("HOPS", "py engine").split()
hops: dict[tuple[str, str, str], int] = {}


def file_of(frame: Any) -> str:
    """Return the frame's file as in csrc, or Python for all other code."""
    table = frame.find_sal().symtab if frame else None
    found = re.search(r"csrc/(\w+/\w+\.[ch])$", table.filename if table else "")
    return found.group(1) if found else "Python"


class Entry(gdb.Breakpoint):  # type: ignore[misc]
    """Notes who called a function, and goes on."""

    def stop(self) -> bool:
        frame = gdb.selected_frame()
        hop = (file_of(frame.older()), file_of(frame), frame.name())
        if hop[0] != hop[1]:
            hops[hop] = hops.get(hop, 0) + 1
        return False


def functions() -> list[str]:
    """Return "file:function" of all functions in the folders."""
    found, file = [], None
    for line in gdb.execute("info functions -n .", to_string=True).splitlines():
        if line.startswith("File "):
            name = re.search(r"(csrc/(\w+)/\w+\.[ch]):$", line)
            file = name.group(1) if name and name.group(2) in FOLDERS else None
        elif file and (function := re.search(r"[ *](\w+)\(", line)):
            found.append(f"{file}:{function.group(1)}")
    return found


for setting in ("pagination off", "debuginfod enabled off", "confirm off"):
    gdb.execute(f"set {setting}")
gdb.Breakpoint("getppid")
gdb.execute("run")
for spec in functions():
    Entry(spec, internal=True)
gdb.execute("continue")
for (caller, callee, name), times in hops.items():
    print(f"{caller:24} -> {callee:24} {name}  x{times}")
print(f"{len(hops)} hops, {len({callee for _, callee, _ in hops})} files")
gdb.execute("kill")
