"""The rank side of the notebook: an IPython shell that runs the cells it receives.

Each rank has its own shell, whose namespace is the module ``__main__``. Cells work as in a
notebook: the last expression is displayed, magics and ``await`` work, and figures appear as PNG.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from fsdpc.distributed import group
from fsdpc.launching.channel import Channel, Message
from fsdpc.launching.forked import _leave
from fsdpc.launching.process import STOPS, enable_stacks

COLLECTIVES = group.__file__
INLINE = "module://matplotlib_inline.backend_inline"
CELL = re.compile(r"<ipython-input-")


def pickler() -> Any:
    """Return cloudpickle if installed, because it can pickle notebook functions; otherwise pickle.

    Either module can load the other's pickles.
    """
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


class _Host:
    """The rank's connection to the notebook: sends messages to it and receives Ctrl-C from it.

    Ctrl-C raises an exception only while a cell runs, and never in the middle of a message.
    """

    def __init__(self, fd: int) -> None:
        self._channel = Channel(fd)
        self._in_cell = self._is_late = False
        self._sending = 0  # messages from the main thread
        self._lock = threading.Lock()
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._in_cell and not self._sending:
            raise KeyboardInterrupt
        self._is_late = self._in_cell

    @contextmanager
    def in_cell(self) -> Iterator[None]:
        """Enable Ctrl-C inside."""
        self._is_late, self._in_cell = False, True
        try:
            yield
        finally:
            self._in_cell = False

    def request(self) -> Message | None:
        """Wait for the next cell, and return None if the notebook has closed its end."""
        while (message := self._channel.receive()) is not None:
            if message["kind"] != "shown":  # from a thread
                break
        return message

    def send(self, message: Message) -> None:
        """Send a message, after waiting for the main thread to finish displaying an object."""
        if threading.current_thread() is not threading.main_thread():
            with self._lock:
                self._channel.send(message)
            return
        self._sending += 1
        try:
            with self._lock:
                self._channel.send(message)
            if message["kind"] == "show":
                self._channel.receive()
        finally:
            self._sending -= 1
        if self._is_late and self._in_cell and not self._sending:
            self._is_late = False
            raise KeyboardInterrupt

    def show(self, **content: Any) -> None:
        """Show an object in the notebook, below the printed text."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.send({"kind": "show", **content})


class _Publisher(DisplayPublisher):
    def publish(  # type: ignore[no-untyped-def]
        self, data, metadata=None, source=None, *, transient=None, update=False, **kwargs
    ) -> None:
        self.shell.host.show(
            data=data, metadata=metadata or {}, transient=transient or {}, update=update
        )

    def clear_output(self, wait: bool = False) -> None:
        self.shell.host.show(clear=True, wait=wait)


class _Hook(DisplayHook):
    def write_output_prompt(self) -> None:
        """Do nothing, because the notebook prints the cell number."""

    def write_format_data(self, format_dict, md_dict=None) -> None:  # type: ignore[no-untyped-def]
        self.shell.host.show(data=format_dict, metadata=md_dict or {}, transient={}, update=False)

    def finish_displayhook(self) -> None:
        self._is_active = False


class RankShell(InteractiveShell):
    """A rank's shell."""

    displayhook_class = Type(_Hook)
    display_pub_class = Type(_Publisher)
    shows_in_notebook = True
    host: _Host
    caught: list[str]

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        self.caught = [str(line) for line in stb]

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing, because ranks have no windows."""

    @classmethod
    def make(cls, host: _Host, colors: str) -> RankShell:
        """Return this process's only shell, replacing any shell inherited through fork."""
        if InteractiveShell.initialized():
            type(InteractiveShell.instance()).clear_instance()
        main = ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, [""]
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = colors
        shell = cls.instance(config=config, user_module=main, user_ns=main.__dict__)
        shell.host, shell.caught = host, []
        os.environ.setdefault("MPLBACKEND", INLINE)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:  # forked with the notebook's figures
            pyplot.close("all")
            shell.enable_matplotlib("inline")
        return shell


def serve(fd: int, colors: str) -> None:
    """Run cells until the notebook closes its end."""
    host = _Host(fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    shell = RankShell.make(host, colors)
    host.send({"kind": "ready"})
    while (request := host.request()) is not None:
        if request["kind"] == "leave":
            _leave()
            host.send({"kind": "done"})
            continue
        answer = _run(shell, request)
        sys.stdout.flush()
        sys.stderr.flush()
        host.send({"kind": "done", **answer})
    _leave()


def main(fd: int, colors: str) -> None:
    """Run cells as a separate program that the notebook started."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    enable_stacks()
    serve(fd, colors)
    os._exit(0)


def _run(shell: RankShell, request: Message) -> Message:
    """Run a cell; return how it ended and the values that the notebook requested."""
    shell.caught = []
    answer: Message = {"error": None, "values": {}}
    try:
        with shell.host.in_cell():
            shell.host.send({"kind": "begun"})
            for name, data in request["values"].items():
                shell.user_ns[name] = load(
                    name, data, "on the rank", "define what it needs in a %%ranks cell"
                )
            shell.execution_count = request["count"]
            result = shell.run_cell(_numbered(request["code"]), store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is None:
                answer["values"] = {
                    name: _dump(shell.user_ns, name) for name in request["wanted"]
                }
    except (Exception, KeyboardInterrupt) as caught:  # from our code, or just outside the cell
        error = caught
    if error is not None:
        answer["error"] = _describe(error, shell.caught)
    return answer


def _numbered(code: str) -> str:
    """Replace the magic with a single line, so that tracebacks show the notebook's line numbers."""
    return code if code.lstrip().startswith("%%") else f"# %%ranks\n{code}"


def load(name: str, data: bytes, where: str, advice: str) -> Any:
    """Unpickle a value, or raise a ValueError that says what failed and how to fix it."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ValueError(f"'{name}' cannot be read {where}: {error}; {advice}") from error


def _dump(namespace: dict[str, Any], name: str) -> bytes:
    if name not in namespace:
        raise NameError(f"the cell has left no '{name}' to bring back (-o {name})")
    try:
        return bytes(pickler().dumps(namespace[name]))
    except Exception as error:
        raise ValueError(
            f"'{name}' of type {type(namespace[name]).__name__} cannot be brought back: {error}; "
            "take numbers or arrays from it"
        ) from error


def _describe(error: BaseException, shown: list[str]) -> Message:
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    frames = [each for each in frames if not each[0].startswith(os.path.dirname(__file__))]
    return {
        "type": type(error).__name__,
        "text": str(error),
        "shown": shown or traceback.format_exception_only(type(error), error),
        "frames": frames,
        "line": next((line for name, line in reversed(frames) if CELL.match(name)), None),
        "is_stop": isinstance(error, KeyboardInterrupt),
        "blames_peer": type(error).__name__ == "PeerError",
        "is_over": _has_ended_world(error, frames),
    }


def _has_ended_world(error: BaseException, frames: list[tuple[str, int | None]]) -> bool:
    """Return whether the world is unusable after an engine error, or after Ctrl-C in a collective.

    Ctrl-C in a training step is different: the next forward completes or discards that step, or
    raises if it can do neither.
    """
    if type(error).__name__ in ("PeerError", "MismatchError"):
        return True
    return isinstance(error, KeyboardInterrupt) and any(name == COLLECTIVES for name, _ in frames)
