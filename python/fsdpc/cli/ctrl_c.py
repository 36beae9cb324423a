"""Handle Ctrl-C while the ``fsdpc`` command imports its modules.

Python imports this package before any code of ``fsdpc`` or ``python -m fsdpc`` runs, and until then
Ctrl-C raises KeyboardInterrupt in the middle of an import. The package therefore imports this
module first. If the process is the command, SIGINT ends it without a traceback until `answer` is
called. Other programs keep their signal handling.
"""

import os
import signal
import sys


def _is_command() -> bool:
    argv = getattr(sys, "argv", None) or [""]
    started = (sys.orig_argv[-len(argv) :] or [""])[0]  # the script, or the argument after -m
    # runpy sets argv[0] to -m until it has found the module.
    return os.path.basename(started) == "fsdpc" and argv[0] in ("-m", started)


_ENDS = _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _ENDS:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def answer() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, now that the command handles it."""
    if _ENDS:
        signal.signal(signal.SIGINT, signal.default_int_handler)
