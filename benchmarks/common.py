"""What benchmarks share: the machine, the commit, medians, rows, ranks."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LAST_WORDS_S = 5.0  # how long the others may go on when a rank failed
ROOT = Path(__file__).resolve().parent.parent


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
    """The commit measured, with a + where the tree differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "--short", "HEAD") + dirty


def header() -> None:
    """Print what every set of rows begins with."""
    print(f"machine: {machine()}\ncommit: {commit()}  date: {time.strftime('%Y-%m-%d')}\n")


def spread(values: Sequence[float]) -> str:
    """Median with the range of the values."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}..{max(values):.3g})"


def alternate(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each in turn, several times, so that a drifting machine treats all alike."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            results[name].append(run())
    return results


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def run_ranks(
    script: str | Path, arguments: Sequence[str], ranks: int, timeout: float = 600, threads: int = 1
) -> dict[str, Any]:
    """Run a script on ranks as torchrun would; rank 0 leaves its result as JSON in
    ``$BENCH_RESULT``.

    Peak PSS of all ranks together (``peak_pss_bytes``) is sampled every 50 ms. A rank that fails
    once the result is there counts as ended: DeepSpeed's threads at times abort the exit.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        env = {
            **os.environ,
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 20000), "FSDPC_RUN_ID": Path(folder).name,
            "OMP_NUM_THREADS": str(threads), "BENCH_RESULT": str(result),
            "BENCH_STORE": str(Path(folder) / "store"),
        }  # fmt: skip
        ranks_ = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=sys.stderr if r == 0 else subprocess.DEVNULL,
            )
            for r in range(ranks)
        ]
        peak, deadline = 0, time.monotonic() + timeout
        while any(p.poll() is None for p in ranks_):
            peak = max(peak, sum(pss(p.pid) for p in ranks_))
            if any(p.returncode for p in ranks_) and not result.exists():
                deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
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
