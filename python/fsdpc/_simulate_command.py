"""``fsdpc simulate``: a training step on hosts that are not here, from one command."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fsdpc import distributed, models
from fsdpc._train_options import (
    DTYPES,
    OPTIMIZERS,
    add_choice,
    add_number,
    add_sharding_options,
)
from fsdpc.models.config import ModelConfig, of_transformers
from fsdpc.simulate import SimulateOptions, simulate
from fsdpc.train import make_model, make_policy

_EPILOG = """\
example:
  fsdpc simulate --preset 7B --hosts 4 --ranks-per-host 8 --device cuda --tflops 400 \\
      --bandwidth 3200 --latency 5 --local-bandwidth 2880 --local-latency 2 --batch 1 --seq 4096

The engine records its own schedule on a device that computes nothing. Nothing is started, and
neither hosts nor GPUs need be here. docs/simulate.md explains the times.
"""

def simulate_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fsdpc simulate``."""
    p = argparse.ArgumentParser(
        prog="fsdpc simulate",
        usage="fsdpc simulate [--option value ...]",
        description="Show what a step of training would take, send and hold in a world that need "
        "not be here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_world_options(p)
    model = add_model_options(p)
    model.add_argument("--checkpoint-activations", nargs="?", const="all", metavar="WHICH",
                       help="all, every N-th block, or a ratio like 0.5")  # fmt: skip
    add_number(model, "--batch", 1, "sequences in a micro-step of one rank")
    add_number(model, "--accumulate", 1, "micro-steps in a step of the optimizer")
    add_sharding_options(p)
    add_choice(p, "--optimizer", OPTIMIZERS, "adamw", "optimizer")
    return p


def add_world_options(p: argparse.ArgumentParser) -> None:
    """Add what says which hosts there are and how fast they are."""
    world = p.add_argument_group("world")
    add_number(world, "--hosts", 1, "hosts")
    add_number(world, "--ranks-per-host", 1, "ranks on each")
    add_choice(world, "--device", ("cpu", "cuda"), "cpu", "what ranks compute on")
    add_number(world, "--tflops", 1.0, "TFLOP/s that a rank reaches in products")
    add_number(world, "--bandwidth", 100.0, "Gbit/s that a host sends to others")
    add_number(world, "--latency", 10.0, "microseconds of a message to another host")
    add_number(world, "--local-bandwidth", math.inf, "Gbit/s of a rank inside its host")
    add_number(world, "--local-latency", 0.0, "microseconds of a hop between GPUs of a host")
    add_number(world, "--message", 0.0, "microseconds of a CPU for each message")
    add_number(world, "--memory-bandwidth", math.inf, "GB/s of an optimizer's pass")
    add_number(world, "--disk-bandwidth", math.inf, "GB/s of a rank, read and written")
    add_number(world, "--core-bandwidth", math.inf, "Gbit/s that a CPU's core sends or receives")
    world.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether bytes move while ranks compute",
    )


def add_model_options(p: argparse.ArgumentParser) -> Any:
    """Add what says which model it is; return the group."""
    model = p.add_argument_group("model")
    add_choice(model, "--model", ("llama", "gpt2"), "llama", "family")
    add_choice(model, "--preset", models.PRESETS, "2M", ", ".join(models.PRESETS), metavar="SIZE")
    model.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="JSON in the place of a preset: fields of ModelConfig, or transformers' config.json",
    )
    add_choice(model, "--dtype", DTYPES, "bf16", "of compute and gathers")
    add_number(model, "--seq", 2048, "words in a sequence")
    return model


def world_options(o: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a simulation that :func:`add_world_options` added, in its units."""
    return {
        "bandwidth": o.bandwidth * 1e9 / 8,
        "latency": o.latency * 1e-6,
        "flops": o.tflops * 1e12,
        "device": o.device,
        "local_bandwidth": o.local_bandwidth * 1e9 / 8,
        "local_latency": o.local_latency * 1e-6,
        "message": o.message * 1e-6,
        "memory_bandwidth": o.memory_bandwidth * 1e9,
        "disk_bandwidth": o.disk_bandwidth * 1e9,
        "core_bandwidth": o.core_bandwidth * 1e9 / 8,
        "overlap": o.overlap,
    }


def main(argv: Sequence[str]) -> int:
    """Run ``fsdpc simulate`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str
        Options, as on the command line.
    """
    o = simulate_parser().parse_args(argv)
    try:
        check_numbers(o)
        model = make_model(o, None if o.config is None else read_config(o.config))
        if o.deterministic:
            distributed.init(0, 1, deterministic=True)
        known = {each.name for each in fields(SimulateOptions)}
        options = {name: value for name, value in vars(o).items() if name in known}
        options.update(mp_policy=make_policy(o), offload_policy=o.offload, **world_options(o))
        print(simulate(model, (o.batch, o.seq), hosts=o.hosts, ranks_per_host=o.ranks_per_host,
                       **options))  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"fsdpc simulate: {error}", file=sys.stderr)
        return 2
    return 0


def check_numbers(options: argparse.Namespace) -> None:
    """Refuse numbers that no world has, as they were written."""
    for name in ("hosts", "ranks_per_host", "batch", "seq", "accumulate"):
        if (value := getattr(options, name, 1)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("tflops", "bandwidth", "local_bandwidth", "memory_bandwidth", "disk_bandwidth"):
        if not (value := getattr(options, name)) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    for name in ("latency", "local_latency", "message"):
        if not 0 <= (value := getattr(options, name)) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {value}")


def read_config(path: Path) -> ModelConfig:
    """Return the shape of a model that a JSON file describes.

    Raises
    ------
    ValueError
        It is no JSON, or lacks what a model needs, or has what these models have not.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path}: a mapping of names to values is wanted")
    try:
        return of_transformers(found) if "hidden_size" in found else ModelConfig(**found)
    except TypeError as error:
        raise ValueError(f"--config {path}: {str(error).split(') ')[-1]}") from None
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
