"""Options and output header that ``fsdpc estimate``, ``simulate`` and ``plan`` share."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdpc import _core, models
from fsdpc.cli.arguments import Parser
from fsdpc.cli.train import make_model
from fsdpc.cli.train_options import DTYPES, add_choice, add_number, add_recompute_option
from fsdpc.models.config import ModelConfig, of_transformers
from fsdpc.optim import BY_NAME


def cluster_parser(
    command: str, description: str, epilog: str, batch: str, count: int = 1
) -> Parser:
    """Return an argument parser with the options that all three commands share.

    Parameters
    ----------
    command : str
        The command's name without ``fsdpc``.
    description, epilog : str
    batch : str
        What ``--batch`` counts.
    count : int, default 1
        Default value of ``--batch``.
    """
    p = Parser(prog=f"fsdpc {command}", usage=f"fsdpc {command} [--option value ...]",
               description=description, epilog=epilog)  # fmt: skip
    world = p.add_argument_group("cluster")
    add_number(world, "--hosts", 1, "hosts")
    add_number(world, "--ranks-per-host", 1, "ranks on each host")
    add_choice(world, "--device", ("cpu", "cuda"), "cpu", "what ranks compute on")
    model = p.add_argument_group("model")
    add_choice(model, "--model", ("llama", "gpt2"), "llama", "family")
    add_choice(model, "--preset", models.PRESETS, "2M", ", ".join(models.PRESETS), metavar="SIZE")
    model.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="JSON instead of a preset: fields of ModelConfig, or transformers' config.json",
    )
    add_choice(model, "--dtype", DTYPES, "bf16", "of compute and gathers")
    add_number(model, "--batch", count, batch)
    add_number(model, "--seq", 2048, "tokens in a sequence")
    model.add_argument(
        "--lora", type=int, metavar="RANK", help="train adapters of this rank on a frozen model"
    )
    model.add_argument(
        "--lora-targets", metavar="NAMES", help="layers that get one (default: all-linear)"
    )
    model.add_argument(
        "--quantize", choices=_core.weight_schemes, help="how it stores linear layers; needs --lora"
    )
    add_choice(model, "--optimizer", BY_NAME, "adamw", "optimizer")
    p.set_defaults(lora_alpha=None, checkpoint_activations=None, tile_tokens=None)
    return p


def add_step_options(p: argparse.ArgumentParser) -> None:
    """Add the options that describe a step, for commands that examine one configuration."""
    step = p.add_argument_group("step")
    add_number(step, "--accumulate", 1, "micro-steps in a step of the optimizer")
    add_recompute_option(step)


def add_rates(p: argparse.ArgumentParser) -> None:
    """Add the options for the cluster's compute and network speed."""
    rates = p.add_argument_group("rates")
    add_number(rates, "--tflops", 1.0, "TFLOP/s that a rank reaches in products")
    add_number(rates, "--bandwidth", 100.0, "Gbit/s that a host sends to others")
    add_number(rates, "--latency", 10.0, "microseconds of a message to another host")
    add_number(rates, "--local-bandwidth", math.inf, "Gbit/s of a rank inside its host")
    add_number(rates, "--local-latency", 0.0, "microseconds of a hop between GPUs of a host")
    add_number(rates, "--message", 0.0, "microseconds of a CPU for each message")
    add_number(rates, "--memory-bandwidth", math.inf, "GB/s of an optimizer's pass")
    add_number(rates, "--disk-bandwidth", math.inf, "GB/s of a rank, read and written")
    add_number(rates, "--core-bandwidth", math.inf, "Gbit/s that a CPU's core sends or receives")
    rates.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether bytes move while ranks compute",
    )


def rates_of(o: argparse.Namespace) -> dict[str, Any]:
    """Return the simulation options added by :func:`add_rates`, in the simulator's units."""
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


def check_numbers(options: argparse.Namespace) -> None:
    """Raise ValueError for impossible cluster numbers, quoting each as the user wrote it."""
    for name in ("hosts", "ranks_per_host", "batch", "seq", "accumulate", "lora", "tile_tokens"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("tflops", "bandwidth", "local_bandwidth", "memory_bandwidth", "disk_bandwidth"):
        if not (value := getattr(options, name, 1.0)) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    for name in ("latency", "local_latency", "message"):
        if not 0 <= (value := getattr(options, name, 0.0)) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
    for name in ("lora_targets", "quantize"):
        if getattr(options, name) is not None and options.lora is None:
            raise ValueError(f"--{name.replace('_', '-')} needs --lora RANK")


def model_of(o: argparse.Namespace) -> Any:
    """Return the model that the options describe, without allocating memory for it."""
    return make_model(o, models.preset(o.preset) if o.config is None else read_config(o.config))


def read_config(path: Path) -> ModelConfig:
    """Return the model shape that a JSON file describes.

    Raises
    ------
    ValueError
        The file is not JSON, lacks a required field, or has an unknown one.
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


def header(
    o: argparse.Namespace, p: argparse.ArgumentParser, model: Any, argv: Sequence[str]
) -> str:
    """Return a header that describes the model, batch and cluster, and lists assumed options.

    Parameters
    ----------
    o, p : Namespace, ArgumentParser
    model : Module
    argv : sequence of str
        The user's arguments; all other options are listed as assumed.
    """
    named = f"{o.model} {o.preset}" if o.config is None else f"{o.model} of {o.config}"
    named += f" with LoRA of rank {o.lora}" if o.lora is not None else ""
    named += f" over {o.quantize}" if o.quantize is not None else ""
    lines = [
        f"{named}, {model.num_parameters():,} parameters",
        f"{o.hosts} host{'s' * (o.hosts > 1)} x {o.ranks_per_host} "
        f"rank{'s' * (o.ranks_per_host > 1)} ({o.device}), batch {o.batch} x {o.seq:,} tokens a "
        f"rank, {o.dtype}",
    ]
    given = {word.partition("=")[0] for word in argv}
    assumed = [
        f"{each.option_strings[0]} {getattr(o, each.dest)}".removesuffix(" True")
        for each in p._actions
        if each.option_strings and each.metavar != "NAMES" and not given & set(each.option_strings)
        and each.default not in (None, False, argparse.SUPPRESS, math.inf, 0.0)
        and not (each.dest == "preset" and o.config is not None)
    ]  # fmt: skip
    if assumed:
        text = "assumed: " + ", ".join(assumed).replace(" ", "\0").replace(",\0", ", ")
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 9, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
