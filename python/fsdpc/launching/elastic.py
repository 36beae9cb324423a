"""``--elastic MIN:MAX``: the range of ranks for a run, and how they share the global batch."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Elastic:
    """The minimum and maximum number of ranks in a run, printed as ``MIN:MAX``."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def parse_elastic(text: str) -> Elastic:
    """Parse ``MIN:MAX``.

    Raises
    ------
    ArgumentTypeError
        The text is not two positive numbers, the smaller one first.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"MIN:MAX are numbers of ranks, 1 <= MIN <= MAX, as in 2:4, got '{text}'"
        )
    return Elastic(int(match[1]), int(match[2]))


def share_batch(sequences: int, ranks: int, batch: int) -> tuple[int, int] | None:
    """Return the per-rank batch size and the number of micro-steps for a global batch size.

    The per-rank batch is at most ``batch``, so no rank needs more memory. Returns None if
    the sequences cannot be divided evenly among the ranks.
    """
    each, rest = divmod(sequences, ranks)
    if rest:
        return None
    batch = next(size for size in range(min(batch, each), 0, -1) if each % size == 0)
    return batch, each // batch
