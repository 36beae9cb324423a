"""``fsdpc plot``: the losses and rates of runs in one picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdpc.cli.arguments import Parser
from fsdpc.monitor import plots

_EPILOG = """\
examples:
  fsdpc train --metrics first.jsonl
  fsdpc plot first.jsonl                           writes first.png
  fsdpc plot first.jsonl second.jsonl -o both.svg
  fsdpc plot one.jsonl two.jsonl four.jsonl --ranks 1,2,4 -o rates.png
"""


def plot_parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc plot``."""
    p = Parser(
        prog="fsdpc plot",
        description="Draw losses and tokens a second of runs, from what fsdpc train --metrics or "
        "--log jsonl:FILE wrote. Needs matplotlib: pip install matplotlib.",
        epilog=_EPILOG,
    )
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a file of JSON lines")
    formats = ", ".join(plots.FORMATS)
    p.add_argument("--ranks", type=_counts, metavar="N,N,...",
                   help="ranks of each run: draw tokens a second over ranks instead")  # fmt: skip
    p.add_argument("-o", "--output", type=Path, metavar="FILE",
                   help=f"{formats} (default: the first run's name, as .png)")  # fmt: skip
    return p


def main(argv: Sequence[str]) -> int:
    """Run ``fsdpc plot`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str
        Command-line options.
    """
    options = plot_parser().parse_args(argv)
    path = options.output or options.runs[0].with_suffix(".png")
    try:
        if options.ranks is None:
            plots.plot_runs(options.runs, path)
        else:
            plots.plot_scaling(_by_ranks(options.ranks, options.runs), path)
    except (ImportError, OSError, ValueError) as error:
        print(f"fsdpc plot: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path}")
    return 0


def _counts(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers as 1,2,4") from None


def _by_ranks(ranks: list[int], runs: list[Path]) -> dict[int, Path]:
    if len(ranks) != len(runs):
        raise ValueError(f"--ranks has {len(ranks)} numbers for {len(runs)} runs: one for each")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"--ranks {','.join(map(str, ranks))}: a number of ranks has one run")
    return dict(zip(ranks, runs, strict=True))
