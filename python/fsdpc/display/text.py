"""Text for people: library messages on stderr, and file names that a locale cannot encode.

Under an ASCII locale, Python decodes non-ASCII bytes in names as surrogates, and its streams
raise on other non-ASCII characters. Text files are UTF-8 in any locale, and output never ends a
run.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

_HANDLER = "fsdpc.degrade"


def say(text: str) -> None:
    """Write a line prefixed with fsdpc to stderr, if there is one (a daemon may have none)."""
    if sys.stderr is not None:
        sys.stderr.write(f"fsdpc: {text}\n")
        sys.stderr.flush()


def as_text(name: str | os.PathLike[str]) -> str:
    """Return a file name in the form used in text files, which is the same in any locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def as_name(text: str) -> str:
    """Return the file name for which :func:`as_text`, in any locale, returned this text."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def never_raise(stream: Any) -> None:
    """Make a stream write names as their bytes, and "?" for other characters it cannot encode."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors=_HANDLER)


def _degrade(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    bad = error.object[error.start : error.end]
    known = (bytes([ord(c) & 0xFF]) if "\udc80" <= c <= "\udcff" else b"?" for c in bad)
    return b"".join(known), error.end


codecs.register_error(_HANDLER, _degrade)
