"""What benchmarks share: the machine, the commit, medians, rows, ranks."""

from __future__ import annotations

import atexit
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LAST_WORDS_S = 5.0  # how long the others may go on when a rank failed
ROOT = Path(__file__).resolve().parent.parent
ROWS = "benchmarks/rows"  # the recorded tables, of which tools/bench_page.py makes a page

_printed: list[list[list[str]]] = []  # tables; the first row of each has the columns


def machine() -> str:
    """Processor, cores and memory in one line."""
    model, flags = platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
            if line.startswith("flags"):
                words = set(line.split())
                flags = "+".join(
                    f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in words
                )
                break
    except OSError:
        pass
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model} ({flags}), {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB"


def commit() -> str:
    """The commit measured, with a + where the tree differs from it.

    $FSDPC_COMMIT names it where a copy of the tree has no git; else it is "unknown".
    """
    if named := os.environ.get("FSDPC_COMMIT"):
        return named

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{ROWS}")
        dirty = "+" if changed else ""
        return git("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def gpus() -> list[str]:
    """A line on each GPU, "name, driver, memory, compute capability", by NVIDIA's own tool.

    RuntimeError says why there is none.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise RuntimeError("no GPU: nvidia-smi, which comes with the driver, is not on PATH")
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    try:
        done = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=60)  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise RuntimeError("no GPU: nvidia-smi did not end within 60 s") from late
    found = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not found:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise RuntimeError(f"no GPU: nvidia-smi ended with {done.returncode} and said: {said}")
    return found


def plugin_says() -> tuple[str, str]:
    """What the plugin for GPUs says of itself and of NCCL, in a process that ends again."""
    code = "import fsdpc; print(fsdpc.cuda.describe()); print(fsdpc.cuda.describe_nccl())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              timeout=120)  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise RuntimeError("fsdpc.cuda.describe() did not end within 120 s") from late
    if done.returncode != 0:
        raise RuntimeError(f"fsdpc.cuda does not describe itself: {done.stderr.strip()[-500:]}")
    plugin, nccl = done.stdout.splitlines()[-2:]
    return plugin, nccl


def versions() -> str:
    """Versions of what is measured, or measured against, by their packages; imports nothing."""
    found = [f"Python {platform.python_version()}"]
    for name in ("numpy", "torch", "transformers", "deepspeed", "nvidia-nccl-cu13",
                 "nvidia-cublas", "nvidia-cudnn-cu13"):  # fmt: skip
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def header() -> None:
    """Print what every set of rows begins with."""
    print(f"machine: {machine()}\ncommit: {commit()}  date: {time.strftime('%Y-%m-%d')}\n"
          f"versions: {versions()}\n")  # fmt: skip


def spread(values: Sequence[float]) -> str:
    """Median with the range of the values."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}..{max(values):.3g})"


def stretches(
    step: Callable[[], object], wait: Callable[[], object], steps: int, rounds: int
) -> list[float]:
    """Seconds of a step in each of some stretches, which have one wait at their end."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        found.append((time.perf_counter() - begin) / steps)
    return found


def alternate(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each in turn, several times, so that a drifting machine treats all alike."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            results[name].append(run())
    return results


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a Markdown table."""
    _printed.append([])
    row(head)
    print("|" + "---|" * len(head), flush=True)
    for cells in rows:
        row(cells)


def row(cells: Sequence[Any]) -> None:
    """Print one more row of the table that was begun last."""
    _printed[-1].append([str(cell) for cell in cells])
    print("| " + " | ".join(_printed[-1][-1]) + " |", flush=True)


@atexit.register
def record() -> None:
    """Append the printed tables to the rows of this benchmark if $FSDPC_BENCH_RECORD is set.

    A table answers the question of the last one with the same columns; one with new columns is on
    the page once you name its question. A benchmark that failed records nothing.
    """
    if not os.environ.get("FSDPC_BENCH_RECORD") or hasattr(sys, "last_value"):
        return
    script = Path(sys.argv[0])
    path = ROOT / ROWS / f"{script.stem.removeprefix('bench_')}.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    where = [machine()]
    with suppress(RuntimeError):
        where += gpus()
    with path.open("a") as file:
        for columns, *rows in filter(lambda each: len(each) > 1, _printed):
            like = [each for each in known if each["columns"] == columns]
            about = like[-1] if like else {"question": "", "title": script.stem}
            entry = {
                "question": about["question"], "title": about["title"],
                "command": " ".join(["python", f"benchmarks/{script.name}", *sys.argv[1:]]),
                "machine": "; ".join(where), "commit": commit(), "date": time.strftime("%Y-%m-%d"),
                "notes": f"{versions()}.", "columns": columns, "rows": rows,
            }  # fmt: skip
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def run_ranks(
    script: str | Path,
    arguments: Sequence[str],
    ranks: int,
    timeout: float = 600,
    threads: int = 1,
    hosts: Sequence[Sequence[str]] = ((),),
    sample: bool = True,
) -> dict[str, Any]:
    """Run a script on ranks as torchrun would; rank 0 leaves its result as JSON in
    ``$BENCH_RESULT``. `hosts` are commands that run others on a host each, which has as many ranks.

    Peak PSS of all ranks together (``peak_pss_bytes``) is sampled every 50 ms, less often where a
    sample takes long (40 ms at 2.4 GB): at most a thirtieth of a core. Calls of microseconds need
    ``sample=False``. A rank that fails once the result is there counts as ended: DeepSpeed's
    threads at times abort the exit.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        here = ranks // len(hosts)
        env = {
            **os.environ,
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 20000), "FSDPC_RUN_ID": Path(folder).name,
            "OMP_NUM_THREADS": str(threads), "BENCH_RESULT": str(result),
            "BENCH_STORE": str(Path(folder) / "store"),
        }  # fmt: skip
        ranks_ = [
            subprocess.Popen(
                [*hosts[r // here], sys.executable, str(script), *arguments],
                env={**env, "RANK": str(r), "LOCAL_RANK": str(r % here)},
                stdout=sys.stderr if r == 0 else subprocess.DEVNULL,
            )
            for r in range(ranks)
        ]
        peak, deadline = 0, time.monotonic() + timeout
        while any(p.poll() is None for p in ranks_):
            begin = time.monotonic()
            peak = max(peak, sum(pss(p.pid) for p in ranks_ if sample))
            sampling = time.monotonic() - begin
            if any(p.returncode for p in ranks_) and not result.exists():
                deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
            if time.monotonic() > deadline:
                break
            time.sleep(max(0.05, 30 * sampling))
        for p in ranks_:
            p.kill()
            p.wait()
        if not result.exists():
            raise RuntimeError(f"{script} {' '.join(arguments)} on {ranks} ranks failed")
        return {**json.loads(result.read_text()), "peak_pss_bytes": peak}


def pss(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def leave_result(result: dict[str, Any]) -> None:
    """On rank 0: hand the result to :func:`run_ranks`."""
    if os.environ.get("RANK", "0") == "0":
        whole = Path(os.environ["BENCH_RESULT"])
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(whole)
