"""Run clang-tidy (the checks of .clang-tidy) over csrc, the files that changed only.

    python tools/tidy.py [name ...]

A file is checked again when it, any header of csrc or .clang-tidy is newer than its last clean run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy

import mpi_build
import native
import stub_args
import stub_docs

STAMPS = native.ROOT / "build" / "tidy"


def flags_of(source: Path) -> list[str]:
    """What the compiler would be given, as far as clang-tidy needs it."""
    table = native.isa_flags()
    suffix = native.isa_suffix(source, table)
    flags = [*native.FLAGS, f"-I{native.CSRC}", *(table[suffix] if suffix else [])]
    if source.relative_to(native.CSRC).parts[0] == "bind":
        paths = sysconfig.get_paths()
        flags += [f"-isystem{paths['include']}", f"-isystem{numpy.get_include()}"]
        flags += [f"-I{STAMPS / 'made'}"]
    if source.parent.name == "cuda":  # CUDA's headers, as far as the plugin uses them
        flags += [f"-isystem{native.ROOT / 'tests' / 'emu'}"]
    if source.parent.name == "mpi":
        flags += mpi_flags()
    return flags


@cache
def mpi_flags() -> list[str]:
    """Where the first MPI found has its headers."""
    for compiler in mpi_build.find_compilers().values():
        shown = subprocess.run([compiler, "-show"], capture_output=True, text=True, check=True)
        return [f"-isystem{word[2:]}" for word in shown.stdout.split() if word.startswith("-I")]
    return []


def newest_shared() -> float:
    """When a header, the checks or the flags last changed."""
    shared = [*native.CSRC.glob("**/*.h"), native.ROOT / ".clang-tidy", Path(native.__file__)]
    return max(path.stat().st_mtime for path in shared)


def check(source: Path, shared: float) -> str:
    """Return what clang-tidy has against a file; "" if nothing, or if it was clean before."""
    stamp = STAMPS / source.relative_to(native.CSRC).with_suffix(".ok")
    newest = max(shared, source.stat().st_mtime)
    if stamp.exists() and stamp.stat().st_mtime > newest:
        return ""
    command = ["clang-tidy", "--quiet", str(source), "--", *flags_of(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stdout or done.stderr
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    return ""


def main() -> int:
    """Check the files that the command line names, or all."""
    if not shutil.which("clang-tidy"):
        sys.exit("tidy: clang-tidy is needed and not installed")
    names = sys.argv[1:]
    layers = (*native.LAYERS, "guest", "cuda", *native.BINDINGS, *(("mpi",) if mpi_flags() else ()))
    files = native.sources(layers)
    chosen = [path for path in files if not names or any(name in path.name for name in names)]
    shared = newest_shared()
    for made in (stub_docs, stub_args):
        made.write(STAMPS / "made")
    with ThreadPoolExecutor(native.usable_cores()) as pool:
        complaints = list(filter(None, pool.map(lambda path: check(path, shared), chosen)))
    print("\n".join(complaints), end="")
    print(f"clang-tidy: {len(chosen)} files, {len(complaints)} with complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
