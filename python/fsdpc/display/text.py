"""Text for people, such as messages on stderr and file names that the locale cannot encode.

Under an ASCII locale, Python decodes non-ASCII bytes in file names as surrogates, and its streams
raise an error for any other non-ASCII character. Text files are UTF-8 in any locale, and output
never ends a run.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

_HANDLER = "fsdpc.degrade"


def say(text: str) -> None:
    """Write a line prefixed with fsdpc to stderr, if it is open (a daemon may have closed it)."""
    if sys.stderr is not None:
        sys.stderr.write(f"fsdpc: {text}\n")
        sys.stderr.flush()


def as_text(name: str | os.PathLike[str]) -> str:
    """Return a file name as it is written in text files, independent of the locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def as_name(text: str) -> str:
    """Return the file name that :func:`as_text` converted to this text in any locale."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def never_raise(stream: Any) -> None:
    """Make a stream write file names as raw bytes, and "?" for characters it cannot encode."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors=_HANDLER)


def _degrade(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    bad = error.object[error.start : error.end]
    known = (bytes([ord(c) & 0xFF]) if "\udc80" <= c <= "\udcff" else b"?" for c in bad)
    return b"".join(known), error.end


codecs.register_error(_HANDLER, _degrade)
