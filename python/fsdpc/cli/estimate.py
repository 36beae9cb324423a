"""``fsdpc estimate``: the per-rank memory of a training run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fsdpc import distributed
from fsdpc.cli.cluster_options import (
    add_step_options,
    check_numbers,
    cluster_parser,
    header,
    model_of,
)
from fsdpc.cli.train import plan_memory
from fsdpc.cli.train_options import add_ema_option, add_sharding_options, check_sharding
from fsdpc.planning.memory_plan import MemoryPlan

_EPILOG = """\
example:
  fsdpc estimate --preset 70B --hosts 256 --ranks-per-host 8 --device cuda

Nothing is started, and neither hosts nor GPUs are needed.
"""


def estimate_parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc estimate``."""
    p = cluster_parser("estimate", "Show what each rank of a training run would hold.", _EPILOG,
                       "sequences in a micro-step of one rank")  # fmt: skip
    add_step_options(p)
    add_ema_option(p)
    add_sharding_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Run ``fsdpc estimate`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str
        Command-line options.
    """
    p = estimate_parser()
    o = p.parse_args(argv)
    try:
        check_numbers(o)
        model = model_of(o)
        plan = plan_of(o, model)
    except (ValueError, OSError) as error:
        print(f"fsdpc estimate: {error}", file=sys.stderr)
        return 2
    print(header(o, p, model, argv), plan, sep="\n")
    return 0


def plan_of(o: argparse.Namespace, model: Any) -> MemoryPlan:
    """Return a rank's memory plan for these options."""
    if o.mesh is None and o.strategy.startswith("HYBRID"):
        o.mesh = (o.hosts, o.ranks_per_host)
    check_sharding(o, o.hosts * o.ranks_per_host)
    if o.deterministic:
        distributed.init(0, 1, deterministic=True)
    plan = plan_memory(o, model, o.hosts * o.ranks_per_host, (o.batch, o.seq))
    if o.deterministic:
        plan = plan.for_micro_steps(o.accumulate)
    return plan.for_device(o.device).for_hosts(o.hosts)
