"""Start ranks on this machine to run a script (:func:`run`) or a function (:func:`launch`).

Both functions set torchrun's variables on every rank (RANK, WORLD_SIZE, LOCAL_RANK, ...), which
:func:`fsdpc.init` reads. Both print the ranks' output as it arrives, prefixing each line with its
rank. However the ranks end, no process is left behind.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import NamedTuple

from fsdpc import _core
from fsdpc.display.text import say
from fsdpc.distributed.environment import check_ranks, rank_environments
from fsdpc.launching.forked import (
    SHOWN_LINES,
    Outcome,
    Report,
    error_report,
    name_ranks,
    refuse_unsafe_fork,
    run_forked,
    use_no_torch_threads,
)
from fsdpc.launching.process import SAVES, STOPS
from fsdpc.launching.screen import rank_lines
from fsdpc.launching.supervisor import CannotStart, Supervisor

__all__ = ["LaunchError", "launch", "run"]

BAD_USAGE = 2  # the exit code for invalid arguments


class LaunchError(RuntimeError):
    """Raised if a rank of :func:`launch` fails: docs/troubleshooting.md#exceptions.

    Attributes
    ----------
    rank : int or None
        The rank that failed first; None if the timeout expired.
    tracebacks : dict of int to str
        Each failed rank's traceback, or how it ended and its last output.
    timed_out : bool
        Whether the timeout ended the ranks.
    """

    def __init__(self, outcome: Outcome, headline: str) -> None:
        super().__init__(f"{headline}\n{outcome.describe()}")
        self.rank: int | None = next(
            (failure.rank for failure in outcome.failures if failure.first), None
        )
        self.tracebacks: dict[int, str] = {
            failure.rank: failure.text for failure in outcome.failures
        }
        self.timed_out: bool = outcome.timed_out


def launch(
    fn: Callable[..., object],
    n: int,
    *args: object,
    timeout: float | None = None,
    env: dict[str, str] | None = None,
    tick: Callable[[], object] | None = None,
) -> list[object]:
    """Run a function on n new ranks on this machine and return their results.

    Parameters
    ----------
    fn : callable
        Called as ``fn(*args)`` on every rank. Closures and functions defined in a notebook work:
        the ranks are forks of this process and inherit its state.
    n : int
        Number of ranks.
    *args
        Passed to every rank.
    timeout : float, optional
        Seconds after which all ranks print their stacks and are stopped; by default never.
    env : dict of str to str, optional
        Environment variables for the ranks, in addition to this process's.
    tick : callable, optional
        Called in this process about twice a second while the ranks run, and once after they end. It
        can show progress, as :meth:`fsdpc.plots.LivePlot.follow` does. If it raises, the ranks are
        stopped.

    Returns
    -------
    list
        The ranks' results in rank order; each must be picklable.

    Raises
    ------
    LaunchError
        A rank raised or died, or the timeout expired; the error contains all tracebacks.
    RuntimeError
        Forking is unsafe here: engine threads are running or CUDA is initialised in this process.
    ValueError
        `n` is below 1 or more than the machine can run.

    Notes
    -----
    The ranks' output goes to this process's ``sys.stdout`` (in a notebook, the cell) as it
    arrives, each line prefixed with its rank. Ctrl-C stops all ranks. If one rank fails, the
    others have 5 s to report.

    Unless OMP_NUM_THREADS is already set, it is set to each rank's share of the cores; torch uses
    it if the rank imports torch. If this process has already imported torch, the ranks run torch
    operations on a single thread, because a thread pool does not survive a fork. If that is too
    slow, use ``fsdpc run``.

    Examples
    --------
    >>> import os
    >>> launch(lambda factor: factor * int(os.environ["RANK"]), 2, 10)
    [0, 10]
    """
    n = check_ranks(n)
    refuse_unsafe_fork()

    def call() -> Report:
        use_no_torch_threads()
        try:
            return Report("ok", fn(*args))
        except (Exception, KeyboardInterrupt) as error:
            return error_report(error)

    variables = {**_share_of_cores(n), **(env or {})}
    with rank_lines() as write:
        outcome = run_forked(call, n, write, timeout=timeout, env=variables, tick=tick)
        if tick:
            tick()
    if outcome.timed_out:
        raise LaunchError(outcome, f"the ranks did not end within {timeout:g} s")
    if outcome.failures:
        names = name_ranks([failure.rank for failure in outcome.failures])
        raise LaunchError(outcome, f"{names} of {n} failed")
    return [report.value for report in outcome.reports if report is not None]


def run(
    command: Sequence[str],
    ranks: int,
    *,
    timeout: float | None = None,
    max_restarts: int = 0,
    again: Sequence[str] = (),
    least: int | None = None,
) -> int:
    """Run a Python script on several ranks on this machine, as ``fsdpc run`` does.

    Parameters
    ----------
    command : sequence of str
        The script, or ``-m`` and a module, followed by arguments.
    ranks : int
        Number of ranks.
    timeout : float, optional
        Seconds, including restarts, after which all ranks print their stacks and are stopped;
        by default never.
    max_restarts : int, default 0
        How many times to restart all ranks after one fails. TORCHELASTIC_RESTART_COUNT contains
        the number of restarts so far. Ranks are not restarted after a signal to this process,
        after the timeout, or if a rank exits with code 2, which means invalid arguments.
    again : sequence of str
        Arguments to add when the script is restarted.
    least : int, optional
        If a signal killed a rank, or a fork failed, restart with one rank fewer, down to this
        minimum; by default `ranks`, so the number stays the same.

    Returns
    -------
    int
        The exit code for the shell: 0; the first failed rank's code (128 + signal number if a
        signal killed it); 124 after a timeout; 128 + 2 after Ctrl-C. Also 0 if all ranks exit
        with 0 after SIGTERM or SIGUSR1, as they do after saving.

    Raises
    ------
    ValueError
        `ranks` is below 1 or more than the machine can run, `max_restarts` is negative, or `least`
        is not in [1, `ranks`].
    FileNotFoundError
        The script does not exist.
    OSError
        A rank could not be forked, and no restart is left.

    Notes
    -----
    SIGINT, SIGTERM and SIGUSR1 are forwarded to all ranks. Must be called from the main thread.

    Examples
    --------
    >>> from fsdpc import launcher
    >>> launcher.run(["train.py", "--lr", "3e-3"], ranks=2)  # doctest: +SKIP
    0
    """
    ranks = check_ranks(ranks)
    if max_restarts < 0:
        raise ValueError(f"the number of restarts must be at least 0, got {max_restarts}")
    if least is not None and not 1 <= least <= ranks:
        raise ValueError(f"the fewest ranks must be in [1, {ranks}], got {least}")
    if command[0] != "-m" and not os.path.isfile(command[0]):
        raise FileNotFoundError(f"no such script: {command[0]}")
    begin = time.monotonic()
    for restarts in range(max_restarts + 1):
        added = {
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        }
        whole = [*command, *(again if restarts else ())]
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
        ending = _run_once(whole, ranks, left, added if max_restarts else {})
        last = restarts == max_restarts or bool(ending.received)
        if ending.refused is not None:
            if last or least is None:
                raise ending.refused
            say(f"{ending.refused}")
        else:
            code = _exit_code(ending.supervisor, ending.received, timeout)
            if last or ending.supervisor.timed_out or code in (0, BAD_USAGE):
                return code
        fewer = max(least or ranks, ranks - ending.died)
        number = f", {fewer} in the place of {ranks}" if fewer < ranks else ""
        say(f"all ranks start again{number} ({restarts + 1} of {max_restarts})")
        ranks = fewer
    raise AssertionError("unreachable")


class _Ending(NamedTuple):
    """How the ranks ended, the signals received meanwhile, and the error of a failed fork."""

    supervisor: Supervisor
    received: list[int]
    refused: OSError | None

    @property
    def died(self) -> bool:
        """Whether the first rank to fail was killed by a signal, or a fork failed."""
        first = self.supervisor.first_failure()
        return self.refused is not None or (first is not None and (first.code or 0) < 0)


def _run_once(
    command: Sequence[str], ranks: int, timeout: float | None, variables: dict[str, str]
) -> _Ending:
    """Start all ranks and wait for them."""
    program = [sys.executable, *command]

    def body(_: int) -> None:
        # fsdpc train unblocks SIGINT once it can handle it, rather than in the middle of its
        # imports.
        ours = list(command[:3]) == ["-m", "fsdpc", "train"]
        answered = STOPS - {signal.SIGINT} if ours else STOPS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, answered)
        os.execv(sys.executable, program)

    received: list[int] = []
    refused = None
    shown = ExitStack()
    supervisor = Supervisor(shown.enter_context(rank_lines()), timeout=timeout)

    def forward(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        supervisor.stop(signum)

    previous = {which: signal.signal(which, forward) for which in STOPS}
    # Lines appear as soon as they are printed; SIGABRT at the timeout prints every thread's stack.
    extra = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **variables}
    extra["PYTHONIOENCODING"] = os.environ.get("PYTHONIOENCODING", "utf-8")  # decoded as UTF-8 here
    extra |= _share_of_cores(ranks)
    try:
        for own in rank_environments(ranks):
            supervisor.start({**own, **extra}, body)
        supervisor.watch()
    except CannotStart as error:
        refused = error
    finally:
        supervisor.close()
        shown.close()
        for which, handler in previous.items():
            signal.signal(which, handler)
    return _Ending(supervisor, received, refused)


def _share_of_cores(ranks: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for `ranks` ranks, or an empty dict if it is already set.

    The engine itself chooses the same number. By default OpenMP (torch) uses all cores on every
    rank, with spinning threads: with two ranks on two cores, steps of small models took 100 times
    as long.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, _core.usable_cores() // ranks))}


def _exit_code(supervisor: Supervisor, received: list[int], timeout: float | None) -> int:
    """Print any failure on stderr and return the exit code for the shell."""
    if received:
        say(f"ended by {signal.Signals(received[0]).name}")
        saved = received[0] in SAVES and all(rank.code == 0 for rank in supervisor.ranks)
        return 0 if saved else 128 + received[0]
    if supervisor.timed_out:
        say(f"the ranks did not end within {timeout:g} s")
        return 124
    first = supervisor.first_failure()
    if first is None:
        return 0
    tail = "".join(f"\n    {line}" for line in list(first.tail)[-SHOWN_LINES:])
    shown = f"; its last output:{tail}" if tail else " and printed nothing"
    say(f"rank {first.rank} failed first ({first.ending()}){shown}")
    others: dict[str, list[int]] = {}
    for rank in supervisor.ranks:
        if rank is not first and rank.code:
            late = " by the launcher" if rank.rank in supervisor.killed else ""
            late += " because it was stopped (SIGSTOP)" if rank.rank in supervisor.stopped else ""
            others.setdefault(rank.ending() + late, []).append(rank.rank)
    for ending, ranks in others.items():
        say(f"{name_ranks(ranks)}: {ending}")
    return first.code if first.code > 0 else 128 - first.code
