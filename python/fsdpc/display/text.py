"""Human-readable text, such as messages on stderr and file names that the locale cannot encode.

Under an ASCII locale, Python decodes non-ASCII bytes in file names as surrogates, and its streams
raise an error for any other non-ASCII character. Text files are UTF-8 in any locale, and an
unencodable character never ends a run.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

_HANDLER = "fsdpc.degrade"


def say(text: str) -> None:
    """Write a line prefixed with "fsdpc: " to stderr, unless it is closed (as in a daemon)."""
    if sys.stderr is not None:
        sys.stderr.write(f"fsdpc: {text}\n")
        sys.stderr.flush()


def as_text(name: str | os.PathLike[str]) -> str:
    """Return a file name in the form used in text files, regardless of the locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def as_name(text: str) -> str:
    """Convert the result of :func:`as_text`, in any locale, back to the file name."""
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
