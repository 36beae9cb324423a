"""Run a Python function on forked ranks and return their results.

Each forked process sends its result over a pipe as a pickle. The only messages ever unpickled are
those between a launcher and its own ranks (here and in pool.py).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fsdpc.distributed.environment import rank_environments
from fsdpc.launching.process import STOPS
from fsdpc.launching.supervisor import Rank, Supervisor

SHOWN_LINES = 30


class Report(NamedTuple):
    """A rank's message; `value` is the result if `kind` is "ok", or text for "error" and "skip"."""

    kind: str
    value: object


class Failure(NamedTuple):
    """Why a rank failed: its traceback or, if there is none, how it ended and its last output."""

    rank: int
    text: str
    first: bool


class Outcome(NamedTuple):
    """How the ranks ended: their reports (or None), the failures, and whether the time ran out."""

    reports: list[Report | None]
    failures: list[Failure]
    timed_out: bool

    def describe(self) -> str:
        """Join the failed ranks' texts without duplicates, starting with the first failure."""
        first = next((failure.rank for failure in self.failures if failure.first), None)
        alike: dict[str, list[int]] = {}
        for failure in sorted(self.failures, key=lambda failure: (not failure.first, failure.rank)):
            alike.setdefault(failure.text.rstrip(), []).append(failure.rank)
        parts = []
        for text, ranks in alike.items():
            several = f"rank {first} failed first" if len(ranks) > 1 else "failed first"
            note = f" ({several})" if first in ranks and len(self.failures) > 1 else ""
            parts.append(f"--- {name_ranks(ranks)}{note} ---\n{text}")
        return "\n".join(parts)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return a phrase such as "rank 2" or "ranks 0-3, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(texts)}"


def refuse_unsafe_fork() -> None:
    """Raise RuntimeError with the reason if forking this process is unsafe.

    The engine's threads do not survive a fork, although the child's memory still lists them, and a
    CUDA context cannot be used in the child. NumPy's BLAS threads are safe: OpenBLAS restarts them.
    Torch's thread pool is not safe and cannot be detected, so :func:`use_no_torch_threads` keeps
    ranks from using it.
    """
    core = sys.modules.get("fsdpc._core")
    count = core.engine_threads() if hasattr(core, "engine_threads") else 0
    if count:
        raise RuntimeError(
            f"cannot fork ranks: {count} engine threads run in this process; call "
            "fsdpc.set_num_threads(1) first and drop sharded models (in a notebook: restart the "
            "kernel and set FSDPC_THREADS=1), or launch before using fsdpc here"
        )
    torch, ours = sys.modules.get("torch"), sys.modules.get("fsdpc.tensors.cuda")
    started = getattr(torch, "cuda", None) is not None and torch.cuda.is_initialized()
    if started or (ours is not None and ours._driver_runs()):
        raise RuntimeError(
            "cannot fork ranks: CUDA is initialised in this process; launch before the first use "
            "of a GPU, or use `fsdpc run --ranks N script.py`"
        )


def use_no_torch_threads() -> None:
    """Make torch compute without its OpenMP pool in a forked rank.

    A child that enters a parallel region of its parent's pool waits forever for threads that do not
    exist. With a single thread, torch never enters a parallel region; its DataLoader workers use
    the same setting.
    """
    torch = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


def run_forked(
    fn: Callable[[], Report],
    ranks: int,
    write: Callable[[str], object],
    *,
    timeout: float | None = None,
    env: dict[str, str] | None = None,
    tick: Callable[[], object] | None = None,
) -> Outcome:
    """Fork `ranks` processes that each call ``fn()`` and send a report; wait for all."""

    def body(result: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        report = fn()
        _send(result, report)
        if report.kind == "ok":
            _leave()

    supervisor = Supervisor(write, timeout=timeout, tick=tick)
    try:
        for variables in rank_environments(ranks):
            supervisor.start({**variables, **(env or {})}, body)
        _watch_until_interrupted(supervisor)
    finally:
        supervisor.close()
    return _collect(supervisor)


def _watch_until_interrupted(supervisor: Supervisor) -> None:
    """Forward Ctrl-C and wait for the ranks to end; a second Ctrl-C kills them immediately."""
    try:
        supervisor.watch()
    except KeyboardInterrupt:
        supervisor.stop(signal.SIGINT)
        supervisor.watch()
        raise


def error_report(error: BaseException) -> Report:
    """Return a rank's traceback as a report, without the launcher's own frame on top."""
    frames = error.__traceback__
    frames = frames.tb_next if frames and frames.tb_next else frames
    return Report("error", "".join(traceback.format_exception(type(error), error, frames)))


def _leave() -> None:
    """Shut down the rank's world, as a separate process would on exit.

    A forked rank runs no exit handlers, so without this call its running peers would report it as
    dead.
    """
    ours = sys.modules.get("fsdpc.distributed")
    if ours is not None:
        ours.shutdown()


def _send(result: int, report: Report) -> None:
    try:
        data = pickle.dumps(tuple(report), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        text = f"the result of type {type(report.value).__name__} cannot be pickled: {error}\n"
        report = Report("error", text)
        data = pickle.dumps(tuple(report))
    view = memoryview(data)
    while view:
        view = view[os.write(result, view) :]
    if report.kind == "error":
        raise SystemExit(1)


def _collect(supervisor: Supervisor) -> Outcome:
    reports: list[Report | None] = []
    failures = []
    first = supervisor.first_failure()
    for rank in supervisor.ranks:
        report = _parse(rank)
        reports.append(report)
        if report is None or report.kind == "error":
            text = str(report.value) if report else _last_words(supervisor, rank)
            failures.append(Failure(rank.rank, text, rank is first))
    return Outcome(reports, failures, supervisor.timed_out)


def _parse(rank: Rank) -> Report | None:
    try:
        return Report(*pickle.loads(rank.payload)) if rank.payload else None
    except (EOFError, pickle.UnpicklingError):
        return None  # it died while sending


def _last_words(supervisor: Supervisor, rank: Rank) -> str:
    if rank.rank in supervisor.killed:
        late = f"{supervisor.grace:g} s after the first"
        why = "at the timeout" if supervisor.timed_out else late
        if rank.rank in supervisor.stopped:
            why = "because it was stopped (SIGSTOP)"
        ending = f"ended by the launcher {why}"
    else:
        ending = rank.ending()
    lines = _without_our_frames(rank.tail)[-SHOWN_LINES:]
    return "\n".join([ending, *(["last output:", *lines] if lines else [])])


def _without_our_frames(lines: Iterable[str]) -> list[str]:
    """Remove the launcher's frames from each stack that faulthandler printed."""
    kept, ours = [], False
    for line in lines:
        ours = line.startswith("  File ") and (ours or (__file__ in line and " in body" in line))
        if not ours:
            kept.append(line)
    return kept
