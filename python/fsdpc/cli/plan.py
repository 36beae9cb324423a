"""``fsdpc plan``: how to train a model on any cluster, real or planned."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdpc.cli.cluster_options import (
    add_rates,
    check_numbers,
    cluster_parser,
    header,
    model_of,
    rates_of,
)
from fsdpc.cli.train import make_policy
from fsdpc.cli.train_options import STATE_DTYPES, add_number, add_storage_options
from fsdpc.display.svg import size
from fsdpc.planning import capacity
from fsdpc.planning.planner import plan

_EPILOG = """\
example:
  fsdpc plan --preset 7B --hosts 2 --ranks-per-host 8 --memory 80 \\
      --device cuda --tflops 400 --bandwidth 3200 --latency 5 \\
      --local-bandwidth 2880 --local-latency 2 --batch 8 --seq 4096

  fsdpc plan --gpus 4x24GB --batch 1   # what can I train here?

All configurations train on the same batch, so the fastest step is the best.
Memory is planned to the byte, and what fits is simulated; nothing is started,
and neither hosts nor GPUs are needed.

The last lines are advice. If nothing fits, or only just, they list changes
that would make it fit, starting with the least costly: --state-dtype bf16,
--offload, shorter --seq, --lora.
"""


def plan_parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc plan``."""
    p = cluster_parser("plan", "Try strategies, meshes, recomputation, offload and micro-batches "
                       "for a model, and show the fastest that fit, with the options of fsdpc "
                       "train.", _EPILOG,
                       "sequences of a rank in a step; micro-batches divide it", 8)  # fmt: skip
    p.add_argument("--memory", type=float, metavar="X",
                   help="GiB of a rank: of its GPU, or its share of the host's")  # fmt: skip
    p.add_argument("--gpus", type=capacity.gpus, metavar="NxGB",
                   help="show which presets train on N GPUs of so many GB, as 4x24GB; of the other "
                   "options it takes --batch, --seq and --dtype")  # fmt: skip
    add_number(p, "--top", 10, "rows to show")
    p.add_argument("--html", type=Path, metavar="FILE",
                   help="write a page: who owns which rows, the memory, the fastest step over time "
                   "and of a second strategy")  # fmt: skip
    add_storage_options(p)
    add_rates(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Run ``fsdpc plan`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str
        Command-line options.
    """
    p = plan_parser()
    o = p.parse_args(argv)
    try:
        check_numbers(o)
        if o.gpus is not None:
            print(_what_fits(o))
            return 0
        if o.memory is None:
            raise ValueError("--memory X says how many GiB a rank has; --gpus 4x24GB what fits")
        if o.top < 1:
            raise ValueError(f"--top must be at least 1, got {o.top}")
        if o.html is not None:
            check_page(o.html)
        model = model_of(o)
        found = plan(
            model, memory=o.memory * 2**30, ranks=o.hosts * o.ranks_per_host,
            ranks_per_host=o.ranks_per_host, batch=o.batch, seq=o.seq, mp_policy=make_policy(o),
            optimizer=o.optimizer, offload_policy=o.offload,
            state_dtype=STATE_DTYPES[o.state_dtype], compression=o.compress, **rates_of(o),
        )  # fmt: skip
        print(header(o, p, model, argv), found.table(o.top), sep="\n")
        if common := _common(o):
            print(f"each with {common}")
        if o.html is not None:
            found.save(o.html, o.top)
            print(f"wrote {o.html}")
        fits = found.choices[0].fits
        if not fits:
            sys.stdout.flush()
            print(f"fsdpc plan: nothing fits in {size(found.limit)}", file=sys.stderr, flush=True)
        print(found.advise())
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"fsdpc plan: {error}", file=sys.stderr)
        return 2
    return 0 if fits else 2


def _common(o: argparse.Namespace) -> str:
    """Return the ``fsdpc train`` options that all configurations share."""
    words = [] if o.lora is None else [f"--lora {o.lora} --init-from FOLDER"]
    words += [] if o.quantize is None else [f"--quantize {o.quantize}"]
    words += [] if o.state_dtype == "fp32" else [f"--state-dtype {o.state_dtype}"]
    return " ".join(words)


def _what_fits(o: argparse.Namespace) -> str:
    ranks, memory = o.gpus
    head = (
        f"{ranks} GPU{'s' * (ranks > 1)} of {memory:g} GiB, batch {o.batch} x {o.seq:,} tokens a "
        f"rank, {o.dtype},\nall blocks recomputed; what CUDA and NCCL take comes on top"
    )
    rows = capacity.table(ranks, memory * 2**30, o.batch, o.seq, make_policy(o))
    return f"{head}\n{rows}"


def check_page(path: Path) -> None:
    """Raise, before planning, if the file cannot be written.

    Raises
    ------
    ValueError
        The file cannot be written; the error explains why and what to do.
    """
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"--html {path} is a folder: name a file in it, as {path / 'plan.html'}")
    if not folder.is_dir():
        raise ValueError(f"--html {path}: there is no folder {folder}: make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--html {path} cannot be written: choose another place, or its rights")
