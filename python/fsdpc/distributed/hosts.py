"""Builds the mpirun or mpiexec command that starts ranks on several hosts.

MPI's launchers know how to start processes on hosts, end them together, and forward signals, output
and exit codes. This process therefore replaces itself with an MPI launcher.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fsdpc import _core

if TYPE_CHECKING:
    import argparse  # the package avoids this import at startup

# MPI families, identified by a string in the launcher's version output.
FAMILIES = {"Open MPI": "openmpi", "OpenRTE": "openmpi", "HYDRA": "mpich"}
PROGRAMS = ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.mpich", "mpiexec.hydra")
TIMEOUT = "MPIEXEC_TIMEOUT"  # both families read it; Hydra's mpiexec rejects it as an option
OURS = ("FSDPC_", "OMP_", "MKL_", "PYTHON", "GLOO_", "NCCL_", "CUDA_")  # forwarded to ranks


def add_options(group: argparse._ActionsContainer) -> None:
    """Add ``--hosts`` and its related options."""
    group.add_argument(
        "--hosts", metavar="A,B", help="on these hosts, by mpirun or mpiexec (docs/hosts.md)"
    )
    group.add_argument(
        "--launcher", metavar="PROGRAM", help="the mpirun or mpiexec (default: the one found)"
    )
    group.add_argument(
        "--agent", metavar="COMMAND", help="starts commands on other hosts (default: ssh)"
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that require ``--hosts`` or conflict with it."""
    if options.hosts is None:
        names = ("launcher", "agent", "ranks_per_host")
        wrong = [name for name in names if getattr(options, name, None) is not None]
        says = "goes with --hosts"
    else:
        wrong = [name for name in ("max_restarts", "elastic") if getattr(options, name)]
        says = "is for the ranks of one host, without --hosts"
    if wrong:
        raise ValueError(f"--{wrong[0].replace('_', '-')} {says}")


def check_hosts(text: str, ranks: int | None, ranks_per_host: int | None) -> tuple[list[str], int]:
    """Parse the hosts, and compute the number of ranks on each.

    Parameters
    ----------
    text : str
        Host names, separated by commas.
    ranks, ranks_per_host : int, optional
        Total or per host; exactly one of them.

    Raises
    ------
    ValueError
        A name is empty or repeated, or the ranks do not divide evenly.
    """
    hosts = text.split(",")
    if "" in hosts or len(set(hosts)) < len(hosts):
        raise ValueError(f"--hosts {text}: give every host once, like a,b")
    if (ranks is None) == (ranks_per_host is None):
        raise ValueError("--hosts goes with --ranks, on all of them")
    if ranks is not None and ranks % len(hosts):
        raise ValueError(f"{ranks} ranks on {len(hosts)} hosts: every host must have as many")
    each = ranks_per_host if ranks is None else ranks // len(hosts)
    assert each is not None
    if each < 1:
        raise ValueError(f"the number of ranks on a host must be at least 1, got {each}")
    return hosts, each


def families() -> list[str]:
    """Return the MPI families for which fsdpc was built."""
    folder = Path(_core.__file__).parent
    known = sorted(set(FAMILIES.values()))
    return [family for family in known if (folder / f"libfsdpc_mpi_{family}.so").exists()]


def find_launcher(name: str | None) -> tuple[str, str]:
    """Return the path and the family of an MPI launcher that this installation supports.

    Raises
    ------
    ValueError
        The launcher was not found.
    """
    built = families()
    if not built:
        raise ValueError("fsdpc was installed without MPI: install one with its mpicc, then fsdpc")
    seen = []
    scripts = sysconfig.get_path("scripts")  # where pip puts the launchers of its wheels
    programs = [name] if name else PROGRAMS
    for path in (shutil.which(each, path=p) for each in programs for p in (None, scripts)):
        if path is None:
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        family = next((f for word, f in FAMILIES.items() if word in said.stdout), None)
        if family in built:
            return path, family
        seen.append(f"{path} is of {family or 'an MPI that is not known'}")
    found = "; ".join(seen) or f"there is no {name or ' or '.join(PROGRAMS[:2])}"
    raise ValueError(f"{found}, and fsdpc was built with {' and '.join(built)}")


def command_line(
    launcher: tuple[str, str],
    hosts: Sequence[str],
    ranks_per_host: int,
    agent: str | None,
    environment: Mapping[str, str],
) -> list[str]:
    """Return the launcher's arguments that precede the command of each rank."""
    path, family = launcher
    size = str(len(hosts) * ranks_per_host)
    if family == "mpich":
        by = ["-launcher", "ssh", "-launcher-exec", agent] if agent else []
        where = ["-hosts", ",".join(hosts), "-ppn", str(ranks_per_host), "-n", size]
        return [path, *by, "-prepend-rank", *where]
    by = ["--mca", "plm_rsh_agent", agent] if agent else []
    where = ["--host", ",".join(f"{host}:{ranks_per_host}" for host in hosts), "-n", size]
    given = [w for name in sorted(environment) if name.startswith(OURS) for w in ("-x", name)]
    return [path, *by, "--tag-output", "--bind-to", "none", *given, *where]


def run(
    command: Sequence[str],
    hosts: Sequence[str],
    ranks_per_host: int,
    *,
    launcher: str | None = None,
    agent: str | None = None,
    timeout: float | None = None,
) -> NoReturn:
    """Print the launcher command for a Python script, then replace this process with it.

    Parameters
    ----------
    command : sequence of str
        The arguments after ``python``: a script, or -m and a module, and its arguments.
    hosts : sequence of str
        Host names, as the launcher understands them.
    ranks_per_host : int
        Number of ranks per host.
    launcher : str, optional
        An mpirun or mpiexec; by default the first for whose MPI family fsdpc was built.
    agent : str, optional
        The command, instead of ssh, that runs commands on other hosts.
    timeout : float, optional
        Seconds after which all ranks are stopped.

    Raises
    ------
    ValueError
        The launcher was not found.
    OSError
        The launcher cannot be started.
    """
    found = find_launcher(launcher)
    line = command_line(found, hosts, ranks_per_host, agent, os.environ)
    line += [sys.executable, *command]
    limit = {} if timeout is None else {TIMEOUT: str(max(1, math.ceil(timeout)))}
    words = [f"{name}={seconds}" for name, seconds in limit.items()]
    print("fsdpc:", shlex.join([*words, *line]), file=sys.stderr, flush=True)
    os.execve(line[0], line, {**os.environ, **limit})
