"""Ranks that srun, mpirun or torchrun started: who they are, and which run they are of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdpc
from fsdpc.distributed.environment import (
    adopt_scheduler,
    find_mpi,
    find_scheduler,
    refuse_contradictions,
)

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_JOB_NUM_NODES": "4"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE") and not name.startswith(("FSDPC_", "SLURM_", "TORCHEL"))
} | {"PYTHONPATH": str(Path(fsdpc.__file__).parents[1])}


@pytest.mark.parametrize("given", [STEP, OPEN_MPI, MPICH], ids=["srun", "mpirun", "mpiexec"])
def test_a_task_of_several_is_a_rank(given: dict[str, str]) -> None:
    variables = dict(given)
    adopt_scheduler(variables)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [variables[name] for name in names] == ["1", "2", "1", "2"]
    assert variables["FSDPC_RUN_ID"]


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},  # torchrun inside of a step
        {"SLURM_STEP_ID": ""},  # a script of sbatch, a shell of salloc
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # SLURM's name of a batch script
        {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # of an interactive shell
        {"SLURM_PTY_PORT": "4711"},  # srun --pty bash
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_who_is_no_task_of_several_is_alone(changed: dict[str, str]) -> None:
    variables = STEP | changed
    before = dict(variables)
    adopt_scheduler(variables)
    assert variables == before and find_scheduler(variables) is None


TWO_HOSTS = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}


@pytest.mark.parametrize(
    ("tasks", "here"), [("2(x2)", "2"), ("2,2", "2"), ("1(x3),1", "1"), ("", "4")]
)
def test_tasks_of_a_host_from_slurms_list(tasks: str, here: str) -> None:
    variables = STEP | TWO_HOSTS | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    adopt_scheduler(variables)
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("4", here)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (STEP | TWO_HOSTS | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
         "4 ranks on 2 hosts, and nothing here carries bytes between them: start them by the "
         "mpirun of an MPI whose mpicc was there when fsdpc was installed, or use fsdpc.torch "
         "after torch.distributed.init_process_group()"),
        (STEP | TWO_HOSTS | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "TASKS_PER_NODE is 3,1"),
        (STEP | TWO_HOSTS | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two', not a list of numbers"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
         "2 ranks"),  # there is no plugin for MPI, or no mpirun above us
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
         "ranks of a host must follow each other"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "3"}, "every host must have the same number"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "LOCAL_RANK must be from 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_several_hosts_is_refused_at_once(
    variables: dict[str, str], text: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import fsdpc; fsdpc.init()"],
        env=CLEAN | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(("NotImplementedError", "ValueError"))
    assert text in done.stderr


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
DAEMON = STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}  # the step of mpirun's own


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (OPEN_MPI | TORCHRUN | {"RANK": "0"},
         ["RANK is 0 and WORLD_SIZE 2", "OMPI_COMM_WORLD_RANK is 1 and OMPI_COMM_WORLD_SIZE 2"]),
        (OPEN_MPI | TORCHRUN | {"WORLD_SIZE": "4"}, ["WORLD_SIZE 4", "OMPI_COMM_WORLD_SIZE 2"]),
        (MPICH | TORCHRUN | {"RANK": "0"}, ["RANK is 0", "PMI_RANK is 1"]),
        (STEP | TORCHRUN | {"RANK": "0"}, ["RANK is 0", "SLURM_PROCID is 1"]),
        (STEP | TORCHRUN | {"WORLD_SIZE": "3"}, ["WORLD_SIZE 3", "SLURM_STEP_NUM_TASKS 2"]),
        (STEP | TORCHRUN | {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
         ["RANK is 1 and WORLD_SIZE 4", "SLURM_PROCID is 1"]),
        (STEP | {"PMI_RANK": "0", "PMI_SIZE": "2"}, ["SLURM_PROCID is 1", "PMI_RANK is 0"]),
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "4"}, ["SLURM_STEP_NUM_TASKS 2", "PMI_SIZE 4"]),
        (OPEN_MPI | MPICH | {"PMI_RANK": "0"}, ["OMPI_COMM_WORLD_RANK is 1", "PMI_RANK is 0"]),
        (OPEN_MPI | MPICH | {"PMI_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE 2", "PMI_SIZE 4"]),
    ],
)  # fmt: skip
def test_launchers_that_contradict_each_other_are_named(
    variables: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        refuse_contradictions(variables)
    assert all(name in str(caught.value) for name in named), caught.value


@pytest.mark.parametrize(
    "variables",
    [
        STEP | TORCHRUN,  # export RANK=$SLURM_PROCID
        STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"},  # srun --mpi=pmi2
        DAEMON | OPEN_MPI,
        DAEMON | MPICH,
        DAEMON | OPEN_MPI | TORCHRUN,
        STEP | {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},  # one on each host
        STEP | {"RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"},
        STEP | {"SLURM_STEP_ID": ""} | TORCHRUN | {"RANK": "0"},  # in a script of sbatch
        STEP | {"RANK": "0", "WORLD_SIZE": "1"},  # every task for itself
        OPEN_MPI | TORCHRUN | {"LOCAL_WORLD_SIZE": "1"},
        OPEN_MPI | TORCHRUN | {"LOCAL_WORLD_SIZE": "2"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"} | TORCHRUN,
    ],
)
def test_launchers_that_agree_or_started_each_other_are_fine(variables: dict[str, str]) -> None:
    refuse_contradictions(variables)


def test_contradictions_end_init() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import fsdpc; fsdpc.init()"],
        env=CLEAN | OPEN_MPI | TORCHRUN | {"RANK": "0"}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and "launchers contradict each other: RANK is 0" in done.stderr


@pytest.mark.parametrize(
    ("variables", "families"),
    [
        (OPEN_MPI, ("openmpi",)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("mpich",)),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, ()),  # of others: torchrun under mpiexec, say
        ({"PMIX_RANK": "0"}, ("openmpi", "mpich")),
        (STEP, ()),
    ],
)
def test_which_mpi_started_a_process(variables: dict[str, str], families: tuple[str, ...]) -> None:
    assert find_mpi(variables, 2) == families


def test_tasks_of_srun_meet() -> None:
    program = "import fsdpc; print(fsdpc.rank(), fsdpc.local_rank(), fsdpc.all_reduce(1))"
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=CLEAN | STEP | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    assert [task.communicate(timeout=300)[0].split() for task in tasks] == [
        ["0", "0", "2"],
        ["1", "1", "2"],
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--ranks", "2", __file__], "this is one of 2 tasks of srun"),
        (["train", "--ranks", "3"], "--ranks 3, and this is one of 2 processes"),
    ],
)
def test_a_task_starts_no_ranks_of_its_own(arguments: list[str], text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdpc", *arguments],
        env=CLEAN | STEP, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert text in done.stderr


def test_workers_of_one_torchrun_share_a_secret() -> None:
    """Whatever stands between it and them, and nobody else knows it."""
    program = "import os; from fsdpc.distributed.environment import run_address as a; "
    program += "print(*a(os.environ))"
    python = f'{sys.executable} -c "{program}"'

    def seen(shell: str, **variables: str) -> str:
        return subprocess.run(
            ["sh", "-c", shell], env=CLEAN | variables, check=True, capture_output=True, timeout=300
        ).stdout.decode()  # fmt: skip

    first, second, stranger = (
        seen(f"exec {python}", TORCHELASTIC_RUN_ID="none"),
        seen(f"{python}; true", TORCHELASTIC_RUN_ID="none"),
        seen(f"TORCHELASTIC_RUN_ID=none {python}; true"),
    )
    assert first == second != stranger
