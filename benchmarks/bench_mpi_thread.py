"""What the thread that calls MPI takes from ranks of one host, while their link is idle.

    python benchmarks/bench_mpi_thread.py [--preset 10M] [--steps 8] [--rounds 5]

Two ranks of one thread each train on one host, which needs no link; in every other run they make
one all the same and send nothing. Told are the median step without and with it, the median over
pairs of runs of what it adds, and the processor time of the thread itself, as a share of the time
that passed: other work on the machine spoils the first two, and not that one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from bench_llama import BATCHES, WARM, fsdpc_step

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import mpi_build

THREAD = "fsdpc-mpi"
OPTIONS = {"openmpi": ["--oversubscribe", "--bind-to", "none"], "mpich": []}


def thread_seconds() -> float:
    """Processor time of the thread so far; 0 where there is none."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == THREAD:
            total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9


def turn(preset: str, steps: int, library: str) -> None:
    """Train on this rank, with a link over this plugin unless it is ""; rank 0 prints."""
    import fsdpc
    from fsdpc import _core

    fsdpc.init()
    link = _core.Transport(fsdpc.rank(), fsdpc.world_size(), library) if library else None
    step = fsdpc_step(preset, "fp32")
    seconds = []
    for i in range(WARM + steps):
        if i == WARM:
            began, taken = time.perf_counter(), thread_seconds()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    share = (thread_seconds() - taken) / (time.perf_counter() - began)
    fsdpc.barrier()
    if fsdpc.rank() == 0:
        print(json.dumps({"step": statistics.median(seconds[WARM:]), "share": share}))
    del link


def run(family: str, compiler: str, o: argparse.Namespace, linked: bool) -> dict[str, Any]:
    """Start both ranks once."""
    import fsdpc

    library = Path(fsdpc.__file__).with_name(mpi_build.library_name(family))
    mpiexec = Path(compiler).with_name(Path(compiler).name.replace("mpicc", "mpiexec"))
    command = [str(mpiexec), *OPTIONS[family], "-n", "2", sys.executable, __file__, "--preset",
               o.preset, "--steps", str(o.steps), "--turn", str(library) if linked else ""]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FSDPC_THREADS": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def main() -> None:
    """Run all families in turns and print the rows."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--preset", default="10M", choices=list(BATCHES))
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--turn", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn is not None:
        turn(o.preset, o.steps, o.turn)
        return
    common.header()
    print(f"load: {os.getloadavg()[0]:.1f}\n")
    rows = []
    for family, compiler in mpi_build.find_compilers().items():
        found = common.alternate(
            {word: lambda word=word: run(family, compiler, o, word == "with")  # noqa: B023
             for word in ("without", "with")}, o.rounds)  # fmt: skip
        steps = {word: [one["step"] for one in each] for word, each in found.items()}
        added = [100 * (b / a - 1) for a, b in zip(*steps.values(), strict=True)]
        share = [100 * one["share"] for one in found["with"]]
        rows.append([family, *(common.spread([1e3 * s for s in each]) for each in steps.values()),
                     common.spread(added), common.spread(share)])
    common.table(["MPI", "step without, ms", "with, ms", "added, %", "the thread, % of a core"],
                 rows)


if __name__ == "__main__":
    main()
