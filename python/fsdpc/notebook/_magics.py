"""The magics ``%ranks`` and ``%%ranks``, with which a notebook controls its ranks."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser

from fsdpc.distributed.environment import check_ranks
from fsdpc.launching.forked import name_ranks, refuse_unsafe_fork
from fsdpc.launching.launcher import _share_of_cores
from fsdpc.launching.pool import Pool, Silent, summary
from fsdpc.notebook._error import RankError
from fsdpc.notebook._output import All, First, write
from fsdpc.notebook._rank import INLINE, load, main, pickler, serve

LINE_HELP = """%ranks N starts N ranks, %ranks says what runs, %ranks stop (or 0) ends them."""
LAST_LINES = 10  # shown of a rank that died
READ_HERE = "bring numbers or arrays back, or import what it needs in the notebook too"


def why_not_fork() -> str | None:
    """Return why ranks cannot be forked, or None if they can."""
    try:
        refuse_unsafe_fork()
    except RuntimeError as error:
        return str(error).partition(";")[0].removeprefix("cannot fork ranks: ")
    for name in ("torch", "ipywidgets"):  # thread pool; lost messages
        if name in sys.modules:
            return f"{name} is imported here"
    ours = sys.modules.get("fsdpc.distributed")
    if ours is not None and ours.is_initialized():
        return "fsdpc.init() was called here"
    return None


@magics_class
class RankMagics(Magics):
    """The ranks of one notebook."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._pool: Pool | None = None
        self._how = ""
        self._lost = ""  # why there are no longer any ranks
        self._count = 0  # how many were last started
        self._pid = os.getpid()
        atexit.register(self.stop)

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """Start and stop ranks (``%ranks``), and run cells on them (``%%ranks``).

        ``%ranks 2``
            Start two persistent ranks, ending earlier ones. ``--spawn`` starts them as separate
            programs, which is the default if a fork would be unsafe.
        ``%ranks``
            Show which ranks are running.
        ``%ranks stop``
            End the ranks; ``%ranks 0`` does the same.
        ``%%ranks``
            Run the cell on all ranks; ``%%ranks 0`` or ``%%ranks 0,2-3`` on some.
        ``%%ranks -i lr,sizes``
            Send notebook variables to the ranks first.
        ``%%ranks -o losses``
            Fetch variables afterwards: a list by rank, or the value if only one rank ran.
        ``%%ranks --all``
            Show every rank's output with its number; by default only the first rank's.
        """
        if cell is None:
            self._line(line)
        else:
            self._cell(line, cell)

    def stop(self) -> None:
        """End the ranks."""
        if self._pool is not None and os.getpid() == self._pid:
            self._pool.close()
        self._pool = None

    # ---- %ranks ----

    def _line(self, line: str) -> None:
        parser = MagicArgumentParser("%ranks", description=LINE_HELP)
        parser.add_argument("number", nargs="?")
        parser.add_argument("--spawn", action="store_true")
        given = parser.parse_args(shlex.split(line))
        if given.number is None:
            self._tell()
            return
        if given.number in ("0", "stop"):
            write("no ranks run\n" if self._pool is None else f"ended {self._names()}\n")
            self.stop()
            self._lost = ""
            return
        if not given.number.isdecimal():
            raise UsageError(f"{LINE_HELP} Got %ranks {line}")
        try:
            number = check_ranks(int(given.number))
        except ValueError as error:
            raise UsageError(f"%ranks {line}: {error}") from None
        self._start(number, given.spawn)
        self._tell()

    def _start(self, number: int, spawn: bool) -> None:
        self.stop()
        self._count, self._lost = number, ""
        why = "as asked" if spawn else why_not_fork()
        colors = self.shell.colors

        def forked(fd: int) -> None:
            serve(fd, colors)

        def spawned(fd: int) -> None:
            os.set_inheritable(fd, True)
            path = f"import sys\nsys.path[:] = {[*sys.path]!r}"
            call = f"from {main.__module__} import main\nmain({fd}, {colors!r})"
            os.execv(sys.executable, [sys.executable, "-c", f"{path}\n{call}"])

        env = {"MPLBACKEND": os.environ.get("MPLBACKEND") or INLINE, **_share_of_cores(number)}
        self._pool = Pool(number, spawned if why else forked, env)
        self._how = f"spawned: {why}" if why else "forked"

    def _names(self) -> str:
        return name_ranks(range(self._count))

    def _tell(self) -> None:
        self._notice_deaths()
        if self._pool is None:
            write(f"{self._lost or 'no ranks run'}; %ranks 2 starts two\n")
            return
        write(f"{self._names()}, {self._how}\n")
        for rank, pid, resident in summary(self._pool):
            memory = "" if resident is None else f", {resident >> 20} MiB"
            write(f"  rank {rank}: pid {pid}{memory}\n")

    # ---- %%ranks ----

    def _cell(self, line: str, cell: str) -> None:
        parser = MagicArgumentParser("%%ranks", description="Run the cell on ranks.")
        parser.add_argument("which", nargs="?")
        parser.add_argument("-i", dest="sent", action="append", default=[], metavar="NAMES")
        parser.add_argument("-o", dest="wanted", action="append", default=[], metavar="NAMES")
        parser.add_argument("--all", action="store_true")
        given = parser.parse_args(shlex.split(line))
        self._notice_deaths()
        if self._pool is None:
            raise UsageError(f"%%ranks: {self._lost or 'no ranks run'}; %ranks 2 starts two")
        ranks = self._which(given.which)
        wanted = _names(given.wanted)
        request = {
            "kind": "run",
            "code": cell,
            "count": self.shell.execution_count,
            "values": self._values(_names(given.sent)),
            "wanted": wanted,
        }
        output = (All if given.all else First)(ranks, self.shell)
        try:
            answers = self._pool.ask({rank: request for rank in ranks}, output)
            output.close()
        except BaseException:
            self._lose("the notebook could not show what ranks printed")
            raise
        self._raise(ranks, answers, given.all)
        for name in wanted:
            values = [
                load(name, answers[rank]["values"][name], "here", READ_HERE) for rank in ranks
            ]
            self.shell.user_ns[name] = values[0] if len(values) == 1 else values

    def _which(self, text: str | None) -> list[int]:
        """Parse a list of ranks such as "0,2-3"."""
        if text is None:
            return list(range(self._count))
        found: set[int] = set()
        for part in text.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            if match is None or not int(match[1]) <= int(match[2] or match[1]) < self._count:
                raise UsageError(
                    f"%%ranks {text}: name some of {self._names()}, as in 0 or 0,2-3"
                )
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return sorted(found)

    def _values(self, names: list[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            if name not in self.shell.user_ns:
                raise UsageError(f"%%ranks -i {name}: the notebook has no variable '{name}'")
            try:
                found[name] = pickler().dumps(self.shell.user_ns[name])
            except Exception as error:
                kind = type(self.shell.user_ns[name]).__name__
                text = f"%%ranks -i {name}: a {kind} cannot be sent ({error}); make it in the cell"
                raise UsageError(text) from None
        return found

    # ---- failures ----

    def _notice_deaths(self) -> None:
        if self._pool is not None and self._pool.look():
            self._lose(f"{self._deaths()}, and the others were ended")

    def _deaths(self) -> str:
        assert self._pool is not None
        return ", ".join(
            f"rank {rank.rank} (pid {rank.started.pid}): {rank.ending()}"
            for rank in self._pool.ended()
            if rank.rank not in self._pool.killed
        )

    def _lose(self, why: str) -> None:
        self._lost = why
        self.stop()

    def _raise(self, ranks: list[int], answers: dict[int, Any], shown: bool) -> None:
        """Raise an error if the cell failed."""
        pool = self._pool
        assert pool is not None
        errors = {rank: answers[rank]["error"] for rank in ranks if rank in answers}
        errors = {rank: error for rank, error in errors.items() if error}
        texts = {rank: _plain(error) for rank, error in errors.items()}
        if pool.ended():
            lines = _told(errors)
            for rank in pool.ended():
                unseen = shown or rank.rank == ranks[0] or rank.rank in pool.killed
                if not unseen and rank.tail:
                    lines.append(f"rank {rank.rank} printed last:")
                    lines += [f"    {each}" for each in list(rank.tail)[-LAST_LINES:]]
            texts |= {rank.rank: rank.ending() for rank in pool.ended()}
            self._lose(f"{self._deaths()}, and the others were ended")
            text = f"{self._lost}; %ranks {self._count} starts new ones"
            raise RankError(text, [*lines, f"RankError: {text}"], texts)
        if pool.stuck:
            stuck = name_ranks(pool.stuck)
            self._start(self._count, self._how.startswith("spawned"))
            raise _stopped(f"{stuck} did not stop: {self._names()} were started again, and have "
                           "lost their names")  # fmt: skip
        if not errors:
            return
        interrupted = pool.was_interrupted()
        after = self._leave_world() if any(error["is_over"] for error in errors.values()) else ""
        if interrupted and any(error["is_stop"] for error in errors.values()):
            where = [f"rank {r} in line {e['line']}" for r, e in errors.items() if e["line"]]
            at = f" ({', '.join(where)})" if where else ""
            raise _stopped(f"{name_ranks(errors)} stopped{at} and kept their names{after}")
        first = min(errors, key=lambda rank: (_is_echo(errors[rank]), rank))
        text = f"{name_ranks(errors)}: {errors[first]['type']}: {errors[first]['text']}{after}"
        raise RankError(text, [*_told(errors), *([f"RankError{after}"] if after else [])], texts)

    def _leave_world(self) -> str:
        """Make all ranks leave the failed world, and return a message about the consequences."""
        assert self._pool is not None
        self._pool.ask({rank: {"kind": "leave"} for rank in range(self._count)}, Silent())
        return (
            ": these collectives cannot go on, so all ranks have called fsdpc.shutdown() and will "
            "join again; models that were sharded have to be made anew"
        )


def _stopped(text: str) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt that is shown without this process's frames."""
    error = KeyboardInterrupt(text)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {text}"]  # type: ignore[attr-defined]
    return error


def _is_echo(error: Any) -> bool:
    """Return whether a rank failed only because another rank did."""
    return bool(error["blames_peer"] or error["is_stop"])


def _told(errors: dict[int, Any]) -> list[str]:
    """Return each distinct traceback once, with its ranks; knock-on failures get one line each."""
    alike: dict[Any, list[int]] = {}
    for rank, error in errors.items():
        alike.setdefault((error["type"], tuple(error["frames"])), []).append(rank)
    only_echoes = all(_is_echo(error) for error in errors.values())
    lines: list[str] = []
    for ranks in sorted(alike.values(), key=lambda ranks: _is_echo(errors[ranks[0]])):
        error = errors[ranks[0]]
        if _is_echo(error) and not only_echoes:
            at = f" in line {error['line']}" if error["line"] else ""
            what = "stopped" if error["is_stop"] else f"{error['type']}: {error['text']}"
            lines.append(f"{name_ranks(ranks)}{at}: {what}")
            continue
        lines += [f"{name_ranks(ranks)}:", *error["shown"]]
        for rank in ranks[1:]:
            if errors[rank]["text"] != error["text"]:
                lines.append(f"rank {rank}: {error['type']}: {errors[rank]['text']}")
    return lines


def _plain(error: Any) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["shown"]))


def _names(given: list[str]) -> list[str]:
    names = [name for each in given for name in each.split(",") if name]
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"%%ranks: '{name}' is no name; give names, as in -o losses,step")
    return names
