"""``fsdpc plot``: losses and rates of runs, in one picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdpc import plots

_EPILOG = """\
examples:
  fsdpc train --metrics first.jsonl
  fsdpc plot first.jsonl                           writes first.png
  fsdpc plot first.jsonl second.jsonl -o both.svg
"""


def plot_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fsdpc plot``."""
    p = argparse.ArgumentParser(
        prog="fsdpc plot",
        description="Draw losses and tokens a second of runs, from what fsdpc train --metrics or "
        "--log jsonl:FILE wrote. Needs matplotlib: pip install fsdpc[plots].",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a file of JSON lines")
    formats = ", ".join(plots.FORMATS)
    p.add_argument("-o", "--output", type=Path, metavar="FILE",
                   help=f"{formats} (default: the first run's name, as .png)")  # fmt: skip
    return p


def main(argv: Sequence[str]) -> int:
    """Run ``fsdpc plot`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str
        Options, as on the command line.
    """
    options = plot_parser().parse_args(argv)
    path = options.output or options.runs[0].with_suffix(".png")
    try:
        plots.plot_runs(options.runs, path)
    except (ImportError, OSError, ValueError) as error:
        print(f"fsdpc plot: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}")
    return 0
