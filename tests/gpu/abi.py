"""What the plugin declares of another library, held against that library's own header."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300

sys.path.insert(0, str(ROOT / "tools"))
import cuda_build  # noqa: E402

TOOLKIT = cuda_build.find_toolkit()

# SAME: two constants that the compiler compares.
PREAMBLE = """
#include <stddef.h>
#include <{theirs}>
#include "cuda/{ours}"
#define SAME(ours, theirs) _Static_assert((long)(ours) == (long)(theirs), #theirs)
"""


def is_there(header: str) -> bool:
    """Whether there is a toolkit that has this header."""
    return TOOLKIT is not None and any((folder / header).is_file() for folder in TOOLKIT.includes)


def check_compiles(folder: Path, theirs: str, ours: str, code: str) -> None:
    """Compile `code` behind both headers, of a name each, without a warning."""
    source = folder / "same.c"
    source.write_text(PREAMBLE.format(theirs=theirs, ours=ours) + code)
    done = subprocess.run([*cuda_build.host_command(TOOLKIT), "-Werror", "-c", source, "-o",
                           folder / "same.o"], capture_output=True, text=True,
                          timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
