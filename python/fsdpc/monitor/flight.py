"""A flight recorder that writes each rank's last operations on a failure, a signal or request.

The engine always keeps its last FSDPC_TRACE operations, so recording adds no cost. Each rank writes
its own file without a collective, because its peers may be gone. :func:`merge` combines the files
of all ranks on one clock.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from fsdpc import _core, distributed
from fsdpc.display.text import say
from fsdpc.monitor import perfetto
from fsdpc.sharding import rules


class FlightRecorder:
    """Writes this rank's last operations when something goes wrong.

    Parameters
    ----------
    folder : path
        A folder that all ranks can write to; each writes ``flight-rank-N.json`` there.
    model : Module or torch.nn.Module, optional
        Supplies unit names; without it, units are numbered.
    signals : tuple of int, default (SIGUSR2,)
        Signals on which a rank writes its file and continues: use ``kill -USR2`` if a run seems to
        hang. A rank that is waiting in the engine also responds.

    Notes
    -----
    After :meth:`install`, the rank also writes its file when an exception is not caught, before the
    exception is printed. Ranks whose peer was killed end in this way. The killed rank itself writes
    nothing.

    Examples
    --------
    ::

        fsdpc.FlightRecorder("flight", model).install()
        train()

    and after a failure ``fsdpc flight flight`` shows the last operations of all ranks.

    Examples
    --------
    >>> import fsdpc
    >>> recorder = fsdpc.FlightRecorder("flight", model).install()  # doctest: +SKIP
    >>> for x, y in batches:                                        # doctest: +SKIP
    ...     with recorder.step():
    ...         train_one_step(x, y)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Any = None,
        signals: tuple[int, ...] = (signal.SIGUSR2,),
    ) -> None:
        self.folder: Path = Path(folder)
        self.model: Any = model
        self.signals: tuple[int, ...] = signals
        self._before: list[Any] = []
        self._hook: Any = None
        self._is_writing = False

    def install(self) -> FlightRecorder:
        """Start writing files on failures and signals; return self. Call it in the main thread."""
        if self._hook is None:
            self._before = [signal.signal(number, self._on_signal) for number in self.signals]
            self._hook, sys.excepthook = sys.excepthook, self._on_exception
        return self

    def remove(self) -> None:
        """Undo :meth:`install`."""
        if self._hook is not None:
            for number, before in zip(self.signals, self._before, strict=True):
                signal.signal(number, before)
            sys.excepthook, self._hook = self._hook, None

    def dump(self, reason: str = "asked", since: int = 0) -> Path:
        """Write this rank's file now.

        Parameters
        ----------
        reason : str
            The reason, for readers of the file.
        since : int, default 0
            A time of :func:`time.monotonic_ns`; earlier events are omitted.
        """
        return self._write(reason, since, traceback.format_stack(sys._getframe(1)))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the operations of a healthy step, and write them when the block ends."""
        since = time.monotonic_ns()
        yield
        self._write("step", since, [])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._try_to_write(signal.Signals(number).name, traceback.format_stack(frame))

    def _on_exception(self, kind: Any, error: BaseException, trace: Any) -> None:
        text = "".join(traceback.format_exception_only(kind, error)).strip()
        self._try_to_write(text, traceback.format_tb(trace))
        self._hook(kind, error, trace)

    def _try_to_write(self, reason: str, stack: list[str]) -> None:
        """Write unless already writing; report errors, because a full disk must not end a run."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            self._write(reason, 0, stack)
        except OSError as error:
            say(f"the flight recorder cannot write: {error}")
        finally:
            self._is_writing = False

    def _write(self, reason: str, since: int, stack: list[str]) -> Path:
        record = take(self.model, reason, since, stack)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"flight-rank-{record['rank']}.json"
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(path)
        return path


def take(model: Any, reason: str, since: int, stack: list[str]) -> dict[str, Any]:
    """Return this rank's operations since a :func:`time.monotonic_ns` time, as values for JSON.

    Parameters
    ----------
    model : Module, torch.nn.Module or None
        Supplies unit names.
    reason, stack : str, list of str
        Stored with the operations.
    since : int
    """
    joined = distributed.is_initialized()
    units = rules.units_of(model) if model is not None else []
    return {
        "rank": distributed.rank() if joined else int(os.environ.get("RANK", 0)),
        "world": distributed.world_size() if joined else int(os.environ.get("WORLD_SIZE", 1)),
        "host": socket.gethostname(), "pid": os.getpid(), "reason": reason,
        "now_ns": time.monotonic_ns(), "unix_ns": time.time_ns(),
        "units": [unit.name or "root" for unit in units], "stack": stack,
        "thread": threading.current_thread().name,
        "events": [e for e in _core.trace_events() if e[4] >= since],
    }  # fmt: skip


class Operation(NamedTuple):
    """An operation; times are nanoseconds since the earliest operation, on the common clock."""

    at: int
    rank: int
    what: str
    unit: str
    epoch: int
    bytes: int
    backward: bool


@dataclass(frozen=True, kw_only=True)
class Flight:
    """Recordings combined by :func:`merge`: operations in time order, ranks' reasons and stacks."""

    operations: tuple[Operation, ...]
    ranks: tuple[dict[str, Any], ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return self.timeline()

    def by_rank(self) -> list[tuple[dict[str, Any], list[Operation]]]:
        """Return each rank's record, with its operations in time order."""
        own: dict[int, list[Operation]] = {r["rank"]: [] for r in self.ranks}
        for o in self.operations:
            own[o.rank].append(o)
        return [(r, own[r["rank"]]) for r in self.ranks]

    def timeline(self, rows: int | None = None) -> str:
        """Format the last rows as text, preceded by one line per rank."""
        lines = []
        end = max((r["at"] for r in self.ranks), default=0)
        for r, own in self.by_rank():
            last = "nothing recorded"
            if own:
                last = f"last {_say(own[-1])}, {(r['at'] - own[-1].at) / 1e9:.3f} s before"
            lines.append(f"rank {r['rank']} ({r['host']}, pid {r['pid']}): {r['reason']}; {last}")
        lines += [f"rank {rank}: wrote nothing" for rank in self.missing]
        shown = self.operations if rows is None else self.operations[-rows:]
        lines.append(f"{len(shown)} of {len(self.operations)} operations, the last at the end")
        lines += [f"{(o.at - end) / 1e6:12.3f} ms  rank {o.rank:<3} {_say(o)}" for o in shown]
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """Return the timeline as a Chrome trace, for Perfetto: each rank is a process."""
        events: list[dict[str, Any]] = []
        for r, own in self.by_rank():
            events += perfetto.events(r["rank"], r["host"], own)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`trace` as JSON."""
        Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")


def merge(folder: str | os.PathLike[str]) -> Flight:
    """Read all ranks' files and align them to one clock.

    Parameters
    ----------
    folder : path
        The recorders' folder.

    Raises
    ------
    FileNotFoundError
        The folder contains no files from ranks.

    Notes
    -----
    Ranks on the same host share a clock. Different hosts are aligned by the time of day, as
    precisely as their clocks agree.
    """
    paths = sorted(Path(folder).glob("flight-rank-*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no rank has written there (flight-rank-N.json)")
    return join([json.loads(path.read_text(encoding="utf-8")) for path in paths])


def join(records: list[dict[str, Any]]) -> Flight:
    """Align the operations that ranks recorded with :func:`take` to one clock.

    Parameters
    ----------
    records : list of dict
        One record per rank; at least one.
    """
    found = sorted(records, key=lambda r: r["rank"])
    offsets: dict[str, int] = {}
    for r in found:
        offsets.setdefault(r["host"], r["unix_ns"] - r["now_ns"])
    starts = [r["events"][0][4] + offsets[r["host"]] for r in found if r["events"]]
    ends = [r["now_ns"] + offsets[r["host"]] for r in found]
    first = min(starts or ends)
    operations, ranks = [], []
    for r in found:
        offset = offsets[r["host"]] - first
        ranks.append({**{k: r[k] for k in ("rank", "host", "pid", "reason", "stack")},
                      "at": r["now_ns"] + offset})  # fmt: skip
        for what, unit, epoch, n_bytes, ns, backward in r["events"]:
            name = r["units"][unit] if 0 <= unit < len(r["units"]) else f"unit {unit}"
            name = name if unit >= 0 else ""
            operations.append(
                Operation(ns + offset, r["rank"], what, name, epoch, n_bytes, backward)
            )
    world, there = max(r["world"] for r in found), {r["rank"] for r in found}
    return Flight(
        operations=tuple(sorted(operations)),
        ranks=tuple(ranks),
        missing=tuple(rank for rank in range(world) if rank not in there),
    )


def _say(o: Operation) -> str:
    text = o.what.replace("_", " ") + (f" of {o.unit}" if o.unit else "")
    text += " for backward" if o.backward and o.what in ("gather", "reshard") else ""
    size = f", {o.bytes / 2**20:.3g} MiB" if o.bytes else ""
    return f"{text} (epoch {o.epoch}{size})"
