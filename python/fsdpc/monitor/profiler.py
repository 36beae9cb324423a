"""Profile some steps: record all ranks' computation, transfers and waits in one file, on one clock.

The engine always traces its operations. During a profile it keeps more of them, and also records
what the host waits for. :mod:`fsdpc.monitor.flight` is for runs that fail: each rank writes a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from fsdpc import _core, distributed
from fsdpc.display.text import say
from fsdpc.distributed.agree import agree, gather_bytes
from fsdpc.monitor import flight, perfetto

EVENTS = 1 << 20

#: (kind, unit, epoch, bytes, nanoseconds, in backward), as in ``_core.trace_events``.
Event = tuple[str, int, int, int, int, bool]


class Profile:
    """A profile from :func:`profile`; printing it shows how each rank spent its time.

    Attributes
    ----------
    path : Path
        Path of the trace.
    flight : Flight or None
        All ranks' operations, available after the profile has ended.

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.profile("profile.json", model) as found:  # doctest: +SKIP
    ...     train_one_step(x, y)
    >>> print(found)                                         # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], model: Any, events: int) -> None:
        self.path: Path = Path(path)
        self.model: Any = model
        self.events: int = events
        self.flight: flight.Flight | None = None
        self._since = self._before = 0
        self._own: list[Event] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Profile:
        """Start recording; each rank does so independently."""
        self._before = _core.trace_resize(self.events, True)
        self._since = time.monotonic_ns()
        if "fsdpc.torch" in sys.modules:  # torch's optimizer steps, unseen by the engine
            from fsdpc.torch._profile import mark_optimizers

            self._hooks = mark_optimizers(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End and write the file. The call is collective, unless an exception leaves the block."""
        taken = None
        if error is None:
            taken = flight.take(self.model, "profile", self._since, traceback.format_stack())
            taken["events"] = sorted([*taken["events"], *self._own], key=lambda e: e[4])
        lost = self.events and len(_core.trace_events()) == self.events
        _core.trace_resize(self._before, False)
        for hook in self._hooks:
            hook.remove()
        if taken is not None:
            self._write(taken)
            if lost:
                say(f"the profile has the last {self.events:,} operations of only this rank; "
                    "profile fewer steps, or give events= more")  # fmt: skip

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Show the code inside the block as a span with this name, on a separate track.

        Parameters
        ----------
        name : str
        """
        self._note(f"mark {name}")
        yield
        self._note("mark_end")

    def _note(self, what: str) -> None:
        self._own.append((what, -1, 0, 0, time.monotonic_ns(), False))

    def _write(self, own: dict[str, Any]) -> None:
        """Gather all ranks' operations, and write them on rank 0."""
        data = json.dumps(own).encode()
        joined = distributed.is_initialized()
        all_ = gather_bytes(distributed.world(), data) if joined else [data]
        self.flight = flight.join([json.loads(each) for each in all_])
        error: OSError | None = None
        if own["rank"] == 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.flight.save_trace(self.path)
            except OSError as caught:
                error = caught
        if joined:
            agree(error)
        elif error is not None:
            raise error

    def __str__(self) -> str:
        if self.flight is None:
            return f"a profile for {self.path}, not ended yet"
        lines = []
        for r, own in self.flight.by_rank():
            found, _ = perfetto.spans(own)
            whole = max(1, own[-1].at - own[0].at) if own else 1
            shares = [f"{name} {perfetto.busy(found, kind) / whole:.0%}"
                      for name, kind in (("forward", "forward"), ("backward", "backward"),
                                         ("optimizer", "optim"), ("waiting", "wait"))]  # fmt: skip
            lines.append(f"rank {r['rank']}: {whole / 1e6:,.1f} ms, {', '.join(shares)}")
        return "\n".join(lines)


def profile(
    path: str | os.PathLike[str], model: Any = None, *, events: int = EVENTS
) -> Profile:
    """Profile the steps inside a ``with`` block, and write them as one Chrome trace of all ranks.

    Parameters
    ----------
    path : path
        Path of the file, written by rank 0, for ui.perfetto.dev and ``chrome://tracing``.
    model : Module or torch.nn.Module, optional
        Supplies unit names; without it, units are numbered.
    events : int, default 1048576
        Number of operations, 40 bytes each, that a rank keeps; the oldest are dropped.

    Returns
    -------
    Profile
        A context manager. Its ``mark(name)`` adds spans for your script.

    Raises
    ------
    OSError
        The file cannot be written; raised on all ranks.

    Notes
    -----
    The end of the block is collective: all ranks must take part in the profile. If an exception
    leaves the block, nothing is written. Times are host times. On a GPU, a span ends when the work
    has been submitted to the device; for kernel times use :mod:`torch.profiler`.

    Only one profile runs at a time. A wait is recorded only if the rank actually waits for its
    peers. Steps outside the block run at full speed.

    Examples
    --------
    ::

        with fsdpc.profile("trace.json", model) as found:
            for x, y in batches[:3]:
                with found.mark("step"):
                    model(x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        print(found)

    Examples
    --------
    >>> import fsdpc
    >>> with fsdpc.profile("profile.json", model) as found:  # doctest: +SKIP
    ...     train_one_step(x, y)
    >>> print(found)                                         # doctest: +SKIP
    """
    if events < 1:
        raise ValueError(f"a profile of {events} events: give at least 1")
    return Profile(path, model, events)


class ProfiledSteps:
    """Profiles selected steps of a run.

    Parameters
    ----------
    steps : range
        Step numbers to profile; an empty range profiles nothing.
    path : path
    model : Module or torch.nn.Module
    """

    def __init__(self, steps: range, path: str | os.PathLike[str], model: Any) -> None:
        self.steps: range = steps
        self._profile = profile(path, model)
        self._begun = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run the step inside, profiled if selected (collective at the last selected step)."""
        if number not in self.steps or self._profile.flight is not None:
            yield
            return
        if not self._begun:
            self._begun = True
            self._profile.__enter__()
        with self._profile.mark(f"step {number}"):
            yield
        if number == self.steps[-1]:
            self.end()

    def end(self) -> None:
        """Write the profile so far and report it on rank 0 (collective)."""
        if not self._begun or self._profile.flight is not None:
            return
        self._profile.__exit__(None, None, None)
        if not distributed.is_initialized() or distributed.rank() == 0:
            print(f"profiled into {self._profile.path} (for ui.perfetto.dev)\n{self._profile}")
