"""The argument parser of all ``fsdpc`` commands: 80-column help and suggestions for typos."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn


class _Format(argparse.RawDescriptionHelpFormatter):
    """Wraps one-line descriptions and preserves the line breaks of epilogs."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that rejects abbreviations and suggests the option the user meant."""

    def __init__(self, **options: Any) -> None:
        options = {"formatter_class": _Format, "allow_abbrev": False, **options}
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Print the message, with a suggestion, and exit with code 2.

        Parameters
        ----------
        message : str
            The message from argparse.
        """
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        if unknown:
            message += suggestion(unknown[1], self._option_string_actions)
        invalid = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if invalid:
            message += suggestion(invalid[1], re.findall(r"[\w.-]+", invalid[2]))
        super().error(message)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" if a known option is similar, otherwise an empty string."""
    close = difflib.get_close_matches(word.lower(), list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
