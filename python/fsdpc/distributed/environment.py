"""A rank's environment variables, and the number of ranks that fit on a machine."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

RANKS_PER_CORE = 64
KINDS = ("active", "inactive")  # kinds of cached files
RANK_BYTES = 24 << 20  # private memory of an interpreter with NumPy, without a model


def _number(path: str, label: str = "") -> int | None:
    """Return the number that follows a label in a file in /proc or /sys."""
    try:
        with open(path, encoding="ascii") as lines:
            for line in lines:
                if line.startswith(label):
                    return int(line.removeprefix(label).split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return None


def available_bytes() -> int | None:
    """Return the memory available on the machine or in its control group, whichever is less.

    A control group counts cached files as used, although they can be reclaimed.
    """
    available = _number("/proc/meminfo", "MemAvailable:")
    limit = _number("/sys/fs/cgroup/memory.max")
    used = _number("/sys/fs/cgroup/memory.current")
    found = [] if available is None else [available * 1024]
    if limit is not None and used is not None:
        cached = (_number("/sys/fs/cgroup/memory.stat", f"{kind}_file ") for kind in KINDS)
        found.append(max(0, limit - used + sum(filter(None, cached))))
    return min(found, default=None)


def check_ranks(ranks: int) -> int:
    """Return `ranks` as an int; raise an error if this machine cannot run that many.

    Parameters
    ----------
    ranks : int
        Number of processes to start.

    Raises
    ------
    TypeError
        The number is not an integer.
    ValueError
        The number is below 1, above 64 per usable core, or needs more memory than is available.
    """
    if isinstance(ranks, bool) or not hasattr(ranks, "__index__"):
        raise TypeError(f"the number of ranks must be an integer, got {ranks!r}")
    ranks = ranks.__index__()
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, got {ranks}")
    cores = len(os.sched_getaffinity(0))
    if ranks > RANKS_PER_CORE * cores:
        raise ValueError(
            f"{ranks} ranks are more than this machine can hold: it has {cores} usable cores, and "
            f"{RANKS_PER_CORE} ranks a core ({RANKS_PER_CORE * cores}) is the limit; ask for fewer"
        )
    available = available_bytes()
    if available is not None and ranks * RANK_BYTES > available:
        raise ValueError(
            f"{ranks} ranks need at least {ranks * RANK_BYTES >> 20} MiB and {available >> 20} MiB "
            "are available; ask for fewer"
        )
    return ranks


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Return each rank's variables: those that torchrun would set, and two of our own.

    Two more variables contain descriptors; supervisor.py sets them when it forks the rank.

    MASTER_PORT is a TCP port that is free now, for scripts that call ``init_process_group``. Ranks
    of the engine meet at a socket whose name contains that number and the run's ID, so simultaneous
    runs never collide.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "FSDPC_RUN_ID": secrets.token_hex(8),
        "FSDPC_LAUNCHER_PID": str(os.getpid()),
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(ranks)]


class Scheduler(NamedTuple):
    """The environment variables in which another launcher tells a task its rank."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


SCHEDULERS = (
    Scheduler("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
              "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Scheduler("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Scheduler("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    Scheduler("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)  # fmt: skip
TORCHRUN = Scheduler("torchrun", "RANK", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE")
PMI2 = Scheduler("srun", "PMI_RANK", "PMI_SIZE", "PMI_RANK", "")  # srun --mpi=pmi2, and SLURM's
# SLURM uses step numbers from here on for everything except srun steps, such as batch scripts and
# shells.
SLURM_SPECIAL_STEPS = 0xFFFFFF00


def find_scheduler(environment: Mapping[str, str]) -> Scheduler | None:
    """Return the launcher that started this process as one of several tasks, if any.

    None also stands for torchrun. A process in an sbatch script, or in a shell from salloc or
    ``srun --pty``, is not such a task: it has no step, a special step, or a terminal.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return None
    for each in SCHEDULERS:
        size = _size(environment, each)
        if size == 0:
            continue
        if each.name == "srun":
            step = environment.get("SLURM_STEP_ID", "")
            if not step.isdigit() or int(step) >= SLURM_SPECIAL_STEPS:
                continue
            if "SLURM_PTY_PORT" in environment:
                continue
        return each if size > 1 else None
    return None


def refuse_contradictions(environment: Mapping[str, str]) -> None:
    """Raise ValueError if two launchers contradict each other about this process's rank.

    Launchers may be nested: torchrun assigns its own ranks, mpirun and mpiexec start their daemons
    with srun, and the launcher that set RANK may run once per host. None of these cases counts as a
    disagreement.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "FSDPC_LAUNCHER_PID" in environment:
        return
    others = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE")}
    said = [each for each in SCHEDULERS[:2] if _size(environment, each) > 1]
    if not said and (step := find_scheduler(others)):
        said = [step, *([PMI2] if _size(environment, PMI2) > 1 else [])]
    if said and _size(environment, TORCHRUN) > 1:
        rank, size = _who(environment, TORCHRUN)
        here = environment.get("LOCAL_WORLD_SIZE", "")
        of_host = int(here) if here.isdigit() and here != "0" else 1
        if (rank // of_host, size // of_host) != _who(environment, said[0]):
            said.insert(0, TORCHRUN)
    if len({_who(environment, each) for each in said}) > 1:
        texts = [
            f"{each.rank} is {environment[each.rank]} and {each.world_size} "
            f"{environment[each.world_size]}"
            for each in said
        ]
        raise ValueError(
            f"launchers contradict each other: {'; '.join(texts)}: start the ranks by one of them, "
            "and unset what others have left"
        )


def _who(environment: Mapping[str, str], scheduler: Scheduler) -> tuple[int, int]:
    return int(environment[scheduler.rank]), int(environment[scheduler.world_size])


def _size(environment: Mapping[str, str], scheduler: Scheduler) -> int:
    """Return the number of tasks from the scheduler's variables, or 0 if they are not set."""
    names = scheduler[1:4]
    if not all(environment.get(name, "").isdigit() for name in names):
        return 0
    return int(environment[scheduler.world_size])


def adopt_scheduler(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from srun's or mpirun's, if either started this process.

    Raises
    ------
    ValueError
        SLURM's number of tasks per host has an unknown format.
    NotImplementedError
        The hosts have different numbers of tasks.
    """
    scheduler = find_scheduler(environment)
    if scheduler is None:
        return
    size = environment[scheduler.world_size]
    job = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    environment.update(
        RANK=environment[scheduler.rank],
        WORLD_SIZE=size,
        LOCAL_RANK=environment[scheduler.local_rank],
        LOCAL_WORLD_SIZE=environment.get(scheduler.local_world_size)
        or str(_slurm_tasks_a_host(environment, int(size))),
        FSDPC_RUN_ID=":".join([scheduler.name, *job, _launcher(scheduler.rank)]),
    )


def _slurm_tasks_a_host(environment: Mapping[str, str], size: int) -> int:
    """Parse the number of tasks per host from a list such as "4(x2)" or "4,4"."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name = next((name for name in names if environment.get(name)), "")
    if not name:
        return size
    text = environment[name]
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise ValueError(f"{name} is '{text}', not a list of numbers like 4(x2)")
    counts = {int(part.split("(")[0]) for part in text.split(",")}
    if len(counts) > 1:
        raise NotImplementedError(
            f"every host must have the same number of ranks, and {name} is {text}"
        )
    return counts.pop()


def _launcher(variable: str) -> str:
    """Identify the process that set a variable: the nearest ancestor that lacks the variable.

    An ancestor whose environment is unreadable (another user's process, or a hidden one) counts as
    lacking the variable.
    """
    pid = os.getpid()
    while True:
        pid = int(process_stat(pid)[1])
        try:
            with open(f"/proc/{pid}/environ", "rb") as variables:
                given = any(
                    entry.startswith(f"{variable}=".encode())
                    for entry in variables.read().split(b"\0")
                )
        except OSError:
            given = False
        if not given:
            return f"{pid}.{process_stat(pid)[19]}"


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state onwards, or zeros if it is hidden."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split() or ["0"] * 20
    except OSError:
        return ["0"] * 20


def run_address(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return a prefix for the run's socket names and a secret, both unique to the run.

    Anyone can read the names. A process can compute the secret if it knows FSDPC_RUN_ID, which
    child processes inherit, or has the same torchrun as an ancestor.
    """
    parts = [
        environment.get(name, default)
        for name, default in (
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "0"),
            ("FSDPC_RUN_ID", environment.get("TORCHELASTIC_RUN_ID", "")),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    ]
    if "FSDPC_RUN_ID" not in environment and "TORCHELASTIC_RUN_ID" in environment:
        parts.append(_launcher("TORCHELASTIC_RUN_ID"))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{parts[0]}:{parts[1]}:{digest[:16]}", digest[32:]


def find_mpi(environment: Mapping[str, str], size: int) -> tuple[str, ...]:
    """Return the MPI families that may have started this process as one of ``size`` ranks.

    srun reports only the protocol (PMIx), which several families understand.
    """
    for name, families in (
        ("OMPI_COMM_WORLD_SIZE", ("openmpi",)),
        ("PMI_SIZE", ("mpich",)),
        ("PMIX_RANK", ("openmpi", "mpich")),
    ):
        if environment.get(name) == str(size) or (name == "PMIX_RANK" and name in environment):
            return families
    return ()


pretended_host: int | None = None  # set by pretend.py, for tests


def this_host() -> tuple[str, str]:
    """Return this host's identifier and name; a container may count as a separate host."""
    if pretended_host is not None:
        return f"pretended {pretended_host}", f"node{pretended_host}"
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/net')}", socket.gethostname()


def count_hosts(ranks: Sequence[tuple[str, str]]) -> int:
    """Count the hosts on which the ranks run, given each rank's :func:`this_host`.

    Raises
    ------
    NotImplementedError
        A host's ranks are not consecutive, or hosts have different numbers of ranks.
    """
    runs: list[tuple[tuple[str, str], int]] = []
    for host in ranks:
        if runs and runs[-1][0] == host:
            runs[-1] = (host, runs[-1][1] + 1)
        else:
            runs.append((host, 1))
    said = ", ".join(f"{n} on {name}" for (_, name), n in runs)
    if len({host for host, _ in runs}) < len(runs):
        raise NotImplementedError(
            f"ranks of a host must follow each other, and these are {said}: map them by host "
            "(mpirun --map-by slot, srun --distribution=block)"
        )
    if len({n for _, n in runs}) > 1:
        raise NotImplementedError(f"every host must have the same number of ranks: {said}")
    return len(runs)


def inherited_socket(address: str, rank: int) -> int:
    """Return this rank's listening socket from the launcher, or -1 if missing or already taken.

    The descriptor in FSDPC_RANK_SOCKET is used only if its socket has the name of this rank in this
    run. The program may have changed the address, or this process may be a rank's child, which
    inherited its variables but not its descriptors.
    """
    text = os.environ.pop("FSDPC_RANK_SOCKET", "")
    try:
        fd = int(text)
        with socket.socket(fileno=os.dup(fd)) as listening:
            name = listening.getsockname()
    except (OSError, ValueError):
        return -1
    ours = f"\0fsdpc-{os.geteuid()}-{address}-{rank}".encode()
    return fd if name == ours else -1
