"""Operations of the native frontend next to torch's, at a million elements, on one thread.

    python benchmarks/bench_ops.py [--groups products losses] [--operations softmax gelu]
        [--dtypes fp32 bf16] [--rounds 7] [--seconds 0.4] [--quick]

Every operation of docs/operations.md; modules are calls of these. op_cases.py has inputs and
torch's calls. Both engines have tensors of their own in one process and take turns; both are warm,
and both allocate their results. A row is a call, or a call and its backward from a given gradient.
Times are of the process's processor time, medians and ranges of the rounds. "over torch" is the
ratio of the medians: above 1, fsdpc is slower.

Behind the rows: the ratios by group; cases in which fsdpc takes more than twice torch's time; and
those in steps of transformers, with everything that is slower than torch's in bold.
--quick, for tests, has 4,096 elements and two rounds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = os.environ["FSDPC_THREADS"] = "1"

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import op_cases
from op_cases import FLOATS, GROUPS, OF_TRANSFORMERS, Case, Engine

ENGINES = ("fsdpc", "torch")
SAMPLE_S = 0.004  # of a round, at least, unless one call is longer
FULL, QUICK = 1024, 64  # rows and columns
# Once a block of that size was freed, malloc, which torch uses, keeps blocks of up to that size in
# place of unmapping them, as it does in training. It does so up to 32 MiB.
MALLOC_KEEPS = 7 * 2**20  # floats
SLOW = 2.0
PASSES = [(dtype, backward) for dtype in FLOATS for backward in (False, True)]


class Row(NamedTuple):
    """What was measured of a case, in microseconds."""

    group: str
    case: Case
    shape: str
    dtype: str
    backward: bool
    us: dict[str, list[float]]

    @property
    def name(self) -> str:
        """The case's, as a Markdown table takes it."""
        return self.case.name.replace("|", "\\|")

    @property
    def median(self) -> dict[str, float]:
        """Microseconds by engine."""
        return {engine: statistics.median(us) for engine, us in self.us.items()}

    @property
    def ratio(self) -> float:
        """Time over torch's."""
        return self.median["fsdpc"] / self.median["torch"]

    def cells(self) -> list[str]:
        """The row of the table."""
        what = f"{self.name} + backward" if self.backward else self.name
        takes_dtype = any(each.cast for each in self.case.inputs) or not self.case.inputs
        shape = f"{self.shape} {self.dtype}" if takes_dtype else self.shape
        times = [common.spread(self.us[engine]) for engine in ENGINES]
        return [what, shape, *times, f"{self.ratio:.2f}"]


def seconds(call: Callable[[], Any], count: int) -> float:
    """Processor time of a call, the mean of so many."""
    begin = time.process_time_ns()
    for _ in range(count):
        call()
    return (time.process_time_ns() - begin) / 1e9 / count


def measure(calls: dict[str, Callable[[], Any]], o: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of each engine's call, a number a round."""
    sample = SAMPLE_S / 20 if o.quick else SAMPLE_S
    samples, spent = {}, 0.0
    for engine, call in calls.items():
        call()
        once = max(seconds(call, 2), 1e-7)
        count = max(1, int(sample / once))
        samples[engine] = partial(seconds, call, count)
        spent += once * count
    rounds = 2 if o.quick else min(o.rounds, max(3, int(o.seconds / spent)))
    found = common.alternate(samples, rounds)
    return {engine: [s * 1e6 for s in times] for engine, times in found.items()}


def shape_of(arrays: list[np.ndarray], n: int) -> str:
    """The inputs' extents, and the dtypes that are no float's, as rows show them."""
    kinds = {"float32": "", "float64": " fp64", "bool": " bool", "int64": " int64"}
    shapes = itertools.groupby(
        "x".join(map(str, a.shape)) + kinds[str(a.dtype)] for a in arrays
    )
    counted = [(shape, len(list(equal))) for shape, equal in shapes]
    shown = ", ".join(shape if k == 1 else f"{k} of {shape}" for shape, k in counted)
    return shown or f"{n * n} elements"


def rows_of(group: str, case: Case, n: int, o: argparse.Namespace) -> list[Row]:
    """Measure a case in its dtypes, forward and with backward."""
    rng = np.random.default_rng(0)
    arrays = [each.make(rng) for each in case.inputs]
    engines = {"fsdpc": (Engine("fsdpc"), case.ours), "torch": (Engine("torch"), case.theirs)}
    shape, rows = shape_of(arrays, n), []
    for dtype in [d for d in case.dtypes if d in o.dtypes]:
        calls = {
            name: partial(call, *engine.tensors(arrays, case.inputs, dtype, grad=False))
            for name, (engine, call) in engines.items()
        }
        rows.append(Row(group, case, shape, dtype, False, measure(calls, o)))
        if not case.has_backward:
            continue
        shapes = [tuple(y.shape) for y in op_cases.listed(calls["torch"]())]
        weights = [np.asarray(rng.standard_normal(s), dtype=np.float32) for s in shapes]
        calls = {
            name: engine.with_backward(
                call, engine.tensors(arrays, case.inputs, dtype, grad=True), weights
            )
            for name, (engine, call) in engines.items()
        }
        rows.append(Row(group, case, shape, dtype, True, measure(calls, o)))
    return rows


HEAD = ["operation", "shape", "fsdpc us", "torch us", "over torch"]


def by_group(rows: list[Row]) -> list[list[object]]:
    """Ratios of each group."""
    cells = []
    for group in dict.fromkeys(row.group for row in rows):
        ratios = sorted(row.ratio for row in rows if row.group == group)
        cells.append([group, len(ratios), sum(r <= 1 for r in ratios),
                      sum(r > SLOW for r in ratios), f"{statistics.median(ratios):.2f}",
                      f"{ratios[-1]:.2f}"])  # fmt: skip
    return cells


def short(us: float) -> str:
    """Three digits or more, and no exponent."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def wide(rows: list[Row], bound: float) -> list[list[str]]:
    """A row a case, with times and ratios of all that was measured; above the bound in bold."""
    cells = []
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        found = dict.fromkeys(PASSES, "-")
        for row in own:
            ratio = f"**{row.ratio:.2f}**" if row.ratio > bound else f"{row.ratio:.2f}"
            us = " / ".join(short(row.median[engine]) for engine in ENGINES)
            found[row.dtype, row.backward] = f"{us}: {ratio}"
        cells.append([name, own[0].shape, *found.values()])
    return cells


def summary(rows: list[Row]) -> None:
    """Print ratios by group, and which rows are slow."""
    print("\nBy group:\n")
    common.table(["group", "rows", "not slower", f"over {SLOW:g}x", "median", "worst"],
                 by_group(rows))  # fmt: skip
    head = ["operation", "shape", *(f"{d}{' + backward' if back else ''}" for d, back in PASSES)]
    slow = [row for row in rows if row.ratio > SLOW]
    names = {row.name for row in slow}
    print(f"\nSlower than torch by more than {SLOW:g}x: {len(slow)} of {len(rows)} rows.")
    print("fsdpc us / torch us: the ratio.\n")
    common.table(head, wide([row for row in rows if row.name in names], SLOW))
    steps = [row for row in rows if row.case.operation in OF_TRANSFORMERS]
    some = sum(row.ratio > 1 for row in steps)
    print(f"\nIn steps of transformers, slower than torch at all: {some} of {len(steps)} rows.\n")
    common.table(head, wide(steps, 1))


def parse() -> argparse.Namespace:
    """Return the options."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted({each.operation for cases in GROUPS.values() for each in cases(QUICK)})
    p.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    p.add_argument("--operations", nargs="+", metavar="NAME", help="as docs/operations.md has them")
    p.add_argument("--dtypes", nargs="+", default=list(FLOATS), choices=FLOATS)
    p.add_argument("--rounds", type=int, default=7, help="at most; 3 at least")
    p.add_argument("--seconds", type=float, default=0.4, help="of both engines, for a row")
    p.add_argument("--quick", action="store_true", help="4,096 elements, two rounds")
    o = p.parse_args()
    if unknown := set(o.operations or ()) - set(known):
        p.error(f"no operations {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return o


def main() -> None:
    """Print the tables."""
    o = parse()
    torch.set_num_threads(1)
    torch.empty(MALLOC_KEEPS)
    n = QUICK if o.quick else FULL
    common.header()
    rows: list[Row] = []
    for group in o.groups:
        cases = [c for c in GROUPS[group](n) if not o.operations or c.operation in o.operations]
        found = [row for case in cases for row in rows_of(group, case, n, o)]
        if found:
            print(f"\n{group.capitalize()}:\n")
            common.table(HEAD, [row.cells() for row in found])
        rows += found
    summary(rows)
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
