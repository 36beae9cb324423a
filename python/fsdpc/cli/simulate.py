"""``fsdpc simulate``: simulate a training step on any cluster, real or planned."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from fsdpc import distributed
from fsdpc.cli.cluster_options import (
    add_rates,
    add_step_options,
    check_numbers,
    cluster_parser,
    header,
    model_of,
    rates_of,
)
from fsdpc.cli.train import make_policy
from fsdpc.cli.train_options import STATE_DTYPES, add_sharding_options
from fsdpc.planning.simulate import SimulateOptions, simulate

_EPILOG = """\
example:
  fsdpc simulate --preset 7B --hosts 4 --ranks-per-host 8 --device cuda \\
      --tflops 400 --bandwidth 3200 --latency 5 --local-bandwidth 2880 \\
      --local-latency 2 --batch 1 --seq 4096

The engine records its own schedule on a device that computes nothing. Nothing
is started, and neither hosts nor GPUs are needed. docs/simulate.md explains
the times.
"""


def simulate_parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc simulate``."""
    p = cluster_parser("simulate", "Show how long a step of training would take, and what it "
                       "would send and hold.", _EPILOG,
                       "sequences in a micro-step of one rank")  # fmt: skip
    add_rates(p)
    add_step_options(p)
    add_sharding_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Run ``fsdpc simulate`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str
        Command-line options.
    """
    p = simulate_parser()
    o = p.parse_args(argv)
    try:
        check_numbers(o)
        model = model_of(o)
        if o.deterministic:
            distributed.init(0, 1, deterministic=True)
        known = {each.name for each in fields(SimulateOptions)}
        options = {name: value for name, value in vars(o).items() if name in known}
        options.update(mp_policy=make_policy(o), offload_policy=o.offload, **rates_of(o),
                       compression=o.compress, state_dtype=STATE_DTYPES[o.state_dtype])  # fmt: skip
        found = simulate(model, (o.batch, o.seq), hosts=o.hosts, ranks_per_host=o.ranks_per_host,
                         **options)  # fmt: skip
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"fsdpc simulate: {error}", file=sys.stderr)
        return 2
    print(header(o, p, model, argv), found, sep="\n")
    return 0
