"""The options of ``fsdpc train``: their choices and invalid combinations."""

from __future__ import annotations

import argparse
import math
import os
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fsdpc import _core, models
from fsdpc.cli import train_pretrained, train_tokens
from fsdpc.cli.arguments import Parser
from fsdpc.cli.train_checkpoint import add_options, check_options
from fsdpc.distributed import hosts
from fsdpc.distributed.environment import check_ranks
from fsdpc.launching.elastic import share_batch
from fsdpc.monitor import plots
from fsdpc.monitor.loggers import read_words
from fsdpc.optim import BY_NAME, Optimizer
from fsdpc.optim.lr_scheduler import LRScheduler, schedule_by_name
from fsdpc.sharding.compression import FORMS, Compression
from fsdpc.sharding.mesh import DeviceMesh
from fsdpc.sharding.offload import FIELDS, OffloadPolicy
from fsdpc.sharding.rules import check_reshard
from fsdpc.sharding.strategies import ShardingStrategy, apply_strategy

STATE_DTYPES = {"fp32": _core.float32, "bf16": _core.bfloat16, "int8": "int8"}
DTYPES = {"fp32": _core.float32, "bf16": _core.bfloat16, "fp16": _core.float16}

# Options that --no-NAME turns off, and all options without a value.
SWITCHES = ("deterministic", "separate-documents", "stabilize")
FLAGS = (*SWITCHES, "no-progress", "resume")
# Options that a resumed run cannot change, because the checkpoint's state depends on them.
FIXED = ("model", "preset", "lora", "lora_alpha", "lora_targets", "quantize",
         "optimizer", "seq", "seed")  # fmt: skip
# Options stored in checkpoints; a resumed run reuses those that are not set explicitly.
KEPT = (
    *FIXED, "steps", "lr", "betas", "weight_decay", "clip", "schedule", "warmup", "decay",
    "min_lr_ratio", "ema", "batch", "accumulate", "dtype", "reduce_dtype", "state_dtype",
    "compress", "tile_tokens", "deterministic", "stabilize", "data", "tokenizer", "vocab",
    "separate_documents", "init_from",
)  # fmt: skip

_EPILOG = """\
examples:
  fsdpc train --ranks 2      a 2M LLaMA on Python's library, 1 to 3 minutes
  fsdpc train --ranks 2 --preset 10M --data notes/ --steps 2000
  fsdpc train --ranks 4 --dtype fp32 --accumulate 2 --metrics run.jsonl
  fsdpc train --ranks 2 --checkpoint run --save-hours 1 --stabilize \\
      --log tensorboard:board

The data are bytes of text, or tokens (docs/data.md). The last 500,000 of them
(at most a tenth) are held out for the validation loss. This loss is printed at
the end, with a sample of generated text.

with --resume:
  from the checkpoint, and refused if given otherwise:
    {fixed}
  from the checkpoint unless given (the run then says what changed):
    {kept}
  all other options are those of this command. Turn off a switch with
  --no-deterministic, --no-stabilize or --no-separate-documents. Options in a
  --config file count as given on the command line.
"""


def parser() -> argparse.ArgumentParser:
    """Return the argument parser for ``fsdpc train``."""
    p = Parser(
        prog="fsdpc train",
        usage="fsdpc train [--option value ...]",
        description="Train a language model on text with fully sharded data parallelism.",
        epilog=_EPILOG.format(fixed=_listed(FIXED), kept=_listed(KEPT[len(FIXED) :])),
    )
    run = p.add_argument_group("run")
    run.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes to train on (default: this one, or those of torchrun, srun, mpirun)",
    )
    hosts.add_options(run)
    add_choice(run, "--device", ("cpu", "cuda"), "cpu",
            "what to train on; ranks on cuda take a GPU each, or share")  # fmt: skip
    add_number(run, "--steps", 900, "optimizer steps")
    add_number(run, "--seed", 0, "of weights, data order and dropout")
    run.add_argument("--metrics", type=Path, metavar="FILE", help="write JSON, a line a step")
    run.add_argument(
        "--log",
        metavar="WORDS",
        help="more loggers: tensorboard:DIR, csv:FILE, wandb:PROJECT, mlflow:DIR, with commas "
        "between",
    )
    run.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw losses and rates into this picture, once a minute and at the end",
    )
    run.add_argument(
        "--config", type=Path, metavar="FILE", help="options in TOML; the command line overrides it"
    )
    run.add_argument(
        "--no-progress",
        action="store_true",
        help="print lines now and then on a terminal too, instead of a bar at its bottom",
    )
    run.add_argument(
        "--profile",
        type=_steps,
        metavar="STEPS",
        help="profile steps 10 to 12 by 10:12, or by 3 as many after the first three, on all ranks",
    )
    run.add_argument(
        "--profile-file",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="where to, for ui.perfetto.dev (default: profile.json)",
    )
    add_switch(run, "--stabilize", "skip steps whose loss or gradients jump; after three in a row "
               "go back to the newest checkpoint")  # fmt: skip
    add_number(run, "--sample", 300, "bytes, or tokens, of text to generate at the end")
    model = p.add_argument_group("model")
    add_choice(model, "--model", ("llama", "gpt2"), None, "family (default: llama)")
    add_choice(model, "--preset", models.PRESETS, None,
            f"{', '.join(models.PRESETS)} (default: 2M)", metavar="SIZE")  # fmt: skip
    train_pretrained.add_options(model)
    add_choice(model, "--dtype", DTYPES, "bf16",
            "of compute; masters and sums are fp32; fp16 scales the loss")  # fmt: skip
    add_recompute_option(model)
    data = p.add_argument_group("data")
    data.add_argument(
        "--data",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="text files and folders, or folders of `fsdpc data tokenize` (default: Python's own "
        "standard library)",
    )
    train_tokens.add_options(data)
    add_switch(data, "--separate-documents",
               "if several documents share a sequence, tokens see only their own")  # fmt: skip
    add_number(data, "--batch", 2, "sequences in a micro-step of one rank")
    add_number(data, "--eval-bytes", train_tokens.HELD_OUT,
            "held-out bytes, or tokens, to validate on; 0 skips it", shown="all")  # fmt: skip
    data.add_argument(
        "--eval-every", type=int, metavar="N", help="validate after every N steps as well"
    )
    add_number(data, "--seq", 256, "bytes, or tokens, in a sequence")
    add_number(data, "--accumulate", 1, "micro-steps in a step of the optimizer")
    add_sharding_options(p)
    _add_optimizer_options(p)
    add_options(p)
    p.add_argument("--live", type=int, default=0, help=argparse.SUPPRESS)  # columns
    return p


def _listed(names: Iterable[str]) -> str:
    words = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    return textwrap.fill(words, 74, subsequent_indent=" " * 4, break_on_hyphens=False)


def add_number(group: Any, name: str, default: float, text: str, shown: str = "") -> None:
    """Add a numeric option that has the type of its default."""
    group.add_argument(
        name,
        type=type(default),
        default=default,
        metavar="N" if isinstance(default, int) else "X",
        help=f"{text} (default: {shown or default})",
    )


def add_choice(
    group: Any, name: str, choices: Iterable[str], default: str | None, text: str, **options: Any
) -> None:
    """Add an option with fixed choices; if its default is None, the help text describes it."""
    group.add_argument(
        name,
        choices=tuple(choices),
        default=default,
        help=(f"{text} (default: {default})" if default is not None else text).strip(),
        **options,
    )


def add_switch(group: Any, name: str, text: str) -> None:
    """Add an option that takes no value and that ``--no-NAME`` turns off."""
    group.add_argument(name, action="store_true", help=text)
    group.add_argument(
        name.replace("--", "--no-", 1), dest=name[2:].replace("-", "_"), action="store_false",
        default=False, help=argparse.SUPPRESS,
    )  # fmt: skip


def add_sharding_options(p: argparse.ArgumentParser) -> None:
    """Add the options for sharding a model across ranks."""
    sharding = p.add_argument_group("sharding")
    names = [each.name for each in ShardingStrategy]
    add_choice(sharding, "--strategy", names, "FULL_SHARD", ", ".join(names),
            type=str.upper, metavar="NAME")  # fmt: skip
    sharding.add_argument(
        "--mesh",
        type=_mesh_shape,
        metavar="RxS",
        help="replicas x shards, for the hybrid strategies; R * S ranks",
    )
    sharding.add_argument(
        "--reshard-after-forward",
        type=_true_false_number,
        metavar="WHEN",
        help="true, false or a number of ranks (default: the strategy's)",
    )
    add_storage_options(sharding)
    add_switch(
        sharding,
        "--deterministic",
        "the same bits however --ranks and --accumulate split the global batch into "
        "micro-batches of --batch; on several hosts, and for the shard groups of a --mesh, only "
        "for powers of two",
    )


def add_recompute_option(group: Any) -> None:
    """Add the options for activation checkpointing and for tiles of tokens."""
    group.add_argument(
        "--checkpoint-activations",
        nargs="?",
        const="all",
        metavar="WHICH",
        help="recompute blocks in backward: all, products (not those), every N-th, a ratio, "
        "or what makes activations fit in memory such as 800MiB",
    )
    group.add_argument(
        "--tile-tokens",
        type=int,
        metavar="N",
        help="compute MLPs on N tokens at a time, and recompute them in backward",
    )


def add_ema_option(group: Any) -> None:
    """Add the option for averages of weights."""
    group.add_argument(
        "--ema",
        type=float,
        metavar="DECAY",
        help="average the weights, for validation, export and the sample",
    )


def add_storage_options(group: Any) -> None:
    """Add the options for the dtype and location of the engine's arrays."""
    add_choice(group, "--reduce-dtype", DTYPES, "fp32",
               "in which gradients are written and sent")  # fmt: skip
    add_choice(group, "--state-dtype", STATE_DTYPES, "fp32", "of the optimizer's states")
    group.add_argument(
        "--offload",
        type=_offload,
        metavar="WHAT=disk:PATH",
        help="what is on a disk: optimizer=disk:/var/tmp, or masters=...,activations=...; "
        "fraction=X: how much of it; or in a GPU's host memory: masters=host,optimizer=host",
    )
    group.add_argument(
        "--compress",
        type=_compression,
        metavar="gather=FORM,reduce=FORM,replicas=powersgd8",
        help=f"how parameters and gradients travel between hosts: {', '.join(FORMS)}; or how "
        "replicas sum matrices: powersgd and a rank",
    )


def _steps(text: str) -> range:
    """Parse a range of steps such as ``10:12``, or a number of steps after the warm-up."""
    first, colon, last = text.partition(":")
    try:
        steps = range(int(first), int(last) + 1) if colon else range(4, 4 + int(first))
    except ValueError:
        steps = range(0)
    if not steps or steps[0] < 1:
        raise argparse.ArgumentTypeError(f"steps are written as 10:12, or as 3, got '{text}'")
    return steps


def _mesh_shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"a mesh is written as 2x4, got '{text}'")
    return int(parts[0]), int(parts[1])


def _offload(text: str) -> OffloadPolicy:
    """Parse a policy such as ``optimizer=disk:/path,masters=disk:/path,fraction=0.5``."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        tier, _, path = value.partition(":")
        if name == "fraction":
            options[name] = value
            continue
        if name not in FIELDS:
            raise argparse.ArgumentTypeError(
                f"'{part}': one of {', '.join(FIELDS)}, as in optimizer=disk:/var/tmp, or fraction"
            )
        options[name] = tier
        if path and options.setdefault("path", path) != path:
            raise argparse.ArgumentTypeError(f"one folder for all that is offloaded, got '{text}'")
    try:
        options["fraction"] = float(options.get("fraction", 1))
        return OffloadPolicy(**options)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from None


def _compression(text: str) -> Compression:
    try:
        return Compression.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _true_false_number(text: str) -> bool | int:
    known = {"true": True, "false": False}
    if text.lower() not in known and not text.isdigit():
        raise argparse.ArgumentTypeError(f"true, false or a number of ranks, got '{text}'")
    return known.get(text.lower(), int(text) if text.isdigit() else 0)


SCHEDULES = ("cosine", "linear", "wsd", "wsd-cosine", "wsd-sqrt")


def usual_warmup(steps: int) -> int:
    """Return the default warm-up, which is used without ``--warmup``."""
    return max(1, steps // 20)


def usual_decay(steps: int) -> int:
    """Return the default decay of a WSD schedule, which is used without ``--decay``."""
    return max(1, steps // 10)


def make_schedule(options: argparse.Namespace, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule that the options select."""
    steps = max(options.steps, 1)
    warmup = usual_warmup(steps) if options.warmup is None else options.warmup
    warmup = min(warmup, steps - 1)
    lengths = {"warmup": warmup, "total": steps}
    if options.schedule.startswith("wsd"):
        decay = usual_decay(steps) if options.decay is None else options.decay
        decay = min(decay, steps - warmup)
        lengths = {"warmup": warmup, "stable": steps - warmup - decay, "decay": decay}
    return schedule_by_name(options.schedule, optimizer, min_ratio=options.min_lr_ratio, **lengths)


def _add_optimizer_options(p: argparse.ArgumentParser) -> None:
    optim = p.add_argument_group("optimizer")
    usual = ((name, each._USUAL.get("betas")) for name, each in BY_NAME.items())
    betas = [(name, pair) for name, pair in usual if pair]
    add_choice(optim, "--optimizer", BY_NAME, "adamw", "")
    optim.add_argument(
        "--lr",
        type=float,
        metavar="X",
        help="peak learning rate (default: "
        + ", ".join(f"{each._USUAL['lr']:g} for {name}" for name, each in BY_NAME.items())
        + ")",
    )
    add_choice(optim, "--schedule", SCHEDULES, "cosine", "what the learning rate does after the "
               "warm-up")  # fmt: skip
    optim.add_argument(
        "--warmup", type=int, metavar="N", help="steps of the warm-up (default: a twentieth)"
    )
    optim.add_argument(
        "--decay", type=int, metavar="N", help="steps of a WSD's decay (default: a tenth)"
    )
    add_number(optim, "--min-lr-ratio", 0.05, "learning rate at the end, of the peak's")
    optim.add_argument(
        "--betas",
        type=float,
        nargs=2,
        metavar="X",
        help="(default: " + ", ".join(f"{b[0]} {b[1]} for {name}" for name, b in betas) + ")",
    )
    add_number(optim, "--weight-decay", 0.1, "for tensors of two or more dimensions")
    add_number(optim, "--clip", 1.0, "largest global norm of gradients")
    add_ema_option(optim)


def check_values(options: argparse.Namespace) -> None:
    """Raise ValueError for values that are invalid on any machine."""
    for name in ("batch", "seq", "accumulate", "vocab", "tile_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("steps", "sample", "seed", "eval_bytes"):
        if getattr(options, name) < 0:
            given = f"--{name.replace('_', '-')}"
            raise ValueError(f"{given} must be at least 0, got {getattr(options, name)}")
    if options.seed >= 2**63:
        raise ValueError(f"--seed must be below 2^63, got {options.seed}")
    if options.lr is None:
        options.lr = BY_NAME[options.optimizer]._USUAL["lr"]
    _check_schedule(options)
    for name in ("lr", "clip"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name} must be above 0, got {getattr(options, name)}")
    if options.ema is not None and not 0 <= options.ema < 1:
        raise ValueError(f"--ema must be in [0, 1), got {options.ema}")
    if math.isinf(options.lr):
        raise ValueError("--lr must be finite, got inf")
    if not 0 <= options.weight_decay < math.inf:
        raise ValueError(f"--weight-decay must be at least 0, got {options.weight_decay}")
    if options.checkpoint_activations:
        checkpoint_choice(options.checkpoint_activations)
    train_pretrained.resolve(options)


def _check_schedule(options: argparse.Namespace) -> None:
    for name, least in (("warmup", 0), ("decay", 1), ("eval_every", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            given = f"--{name.replace('_', '-')}"
            raise ValueError(f"{given} must be at least {least}, got {value}")
    if options.decay is not None and not options.schedule.startswith("wsd"):
        raise ValueError(f"--decay is of the WSD schedules, and this is --schedule "
                         f"{options.schedule}")  # fmt: skip
    if not 0 <= options.min_lr_ratio <= 1:
        raise ValueError(f"--min-lr-ratio must be in [0, 1], got {options.min_lr_ratio}")
    if options.betas is not None:
        if "betas" not in BY_NAME[options.optimizer]._USUAL:
            raise ValueError(f"--betas: {options.optimizer} has none")
        if not all(0 <= beta < 1 for beta in options.betas):
            raise ValueError(f"--betas must be in [0, 1), got {options.betas}")
    if options.optimizer in ("muon", "adafactor") and options.state_dtype != "fp32":
        raise ValueError(f"--state-dtype {options.state_dtype}: {options.optimizer}'s states are "
                         "fp32")  # fmt: skip
    if options.stabilize and options.dtype == "fp16":
        raise ValueError("--stabilize does not go with fp16, whose loss scaler skips steps itself")


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for values or combinations that are invalid on this machine."""
    check_values(options)
    hosts.check_options(options)
    if options.ranks is not None:
        if options.hosts is None:
            check_ranks(options.ranks)
        started = os.environ.get("WORLD_SIZE", str(options.ranks))
        if started != str(options.ranks):
            raise ValueError(
                f"--ranks {options.ranks}, and this is one of {started} processes that were "
                "started together already (WORLD_SIZE): leave --ranks out"
            )
    check_options(options)
    if options.elastic is not None:
        check_ranks(options.elastic.most)
        for ranks in range(options.elastic.least, options.elastic.most + 1):
            check_sharding(options, ranks)
    elif options.ranks is not None or "RANK" not in os.environ:
        check_sharding(options, options.ranks or 1)
    if options.log:
        try:
            read_words(options.log)
        except ValueError as error:
            raise ValueError(f"--log {options.log}: {error}") from None
    train_pretrained.check(options)
    if options.profile and options.profile[-1] > options.steps:
        raise ValueError(f"--profile {options.profile[0]}:{options.profile[-1]}, and there are "
                         f"--steps {options.steps}")  # fmt: skip
    if options.plot:
        plots.check_format(options.plot)
        try:
            plots.check_installed()
        except ImportError as error:
            raise ValueError(str(error)) from None
    written = {"--metrics": options.metrics}
    if options.profile:
        written["--profile-file"] = options.profile_file
    for name, path in written.items():
        try:
            if path:
                path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise type(error)(f"cannot write {name} {path}: {error.strerror}") from None


def most_ranks(options: argparse.Namespace) -> int:
    """Return the number of ranks to start."""
    if options.elastic is not None:
        return options.elastic.most
    return 1 if options.ranks is None else options.ranks


def keep_global_batch(options: argparse.Namespace, ranks: int) -> str:
    """Adapt batch and micro-steps to the current number of ranks; return a message about it."""
    if options.elastic is None or ranks == options.elastic.most:
        return ""
    whole = options.elastic.most * options.batch * options.accumulate
    shared = share_batch(whole, ranks, options.batch)
    if shared is None:
        return (
            f"a global batch of {whole} sequences does not divide among {ranks} ranks: steps are "
            f"of {ranks * options.batch * options.accumulate} from here"
        )
    before = options.batch
    options.batch, options.accumulate = shared
    changed = options.deterministic and options.batch != before
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} keep the global batch of {whole} sequences: "
        f"--batch {options.batch} --accumulate {options.accumulate}"
        + (
            f"; sums of micro-batches of {options.batch} sequences have other bits than of {before}"
            if changed
            else ""
        )
    )


def mesh_shape(options: argparse.Namespace, ranks: int) -> tuple[int, int]:
    """Return the numbers of replicas and shards, from ``--mesh`` or the strategy."""
    if options.mesh is not None:
        return options.mesh
    return (ranks, 1) if options.strategy == "NO_SHARD" else (1, ranks)


def check_sharding(options: argparse.Namespace, ranks: int) -> None:
    """Before any rank starts, raise the errors that every rank would otherwise raise."""
    if options.mesh is None and options.strategy.startswith("HYBRID"):
        raise ValueError(f"--strategy {options.strategy} needs --mesh RxS, replicas x shards")
    shape = mesh_shape(options, ranks)
    if math.prod(shape) != ranks:
        text = "x".join(map(str, shape))
        raise ValueError(f"--mesh {text} is of {math.prod(shape)} ranks, not {ranks}")
    check_reshard(options.reshard_after_forward, shape[1])
    mesh = DeviceMesh((), ("replicate", "shard"), shape)
    apply_strategy(options.strategy, mesh, options.reshard_after_forward)


class ActivationMemory(NamedTuple):
    """Memory for activations, for :func:`fsdpc.fit_activations`."""

    bytes: float


def checkpoint_choice(text: str) -> str | int | float | ActivationMemory:
    """Return the argument for :func:`fsdpc.checkpoint_activations`, or the memory to fit in."""
    if text in ("all", "products"):
        return text
    if given := re.fullmatch(r"(\d+(?:\.\d+)?)([MG])iB", text):
        return ActivationMemory(float(given[1]) * 2 ** (20 if given[2] == "M" else 30))
    try:
        choice = int(text) if text.isdigit() else float(text)
        if choice >= 1 if isinstance(choice, int) else 0 < choice <= 1:
            return choice
    except ValueError:
        pass
    raise ValueError(
        "--checkpoint-activations takes all, products, a number of blocks, a ratio up to 1, or "
        f"memory such as 800MiB, got '{text}'"
    )
