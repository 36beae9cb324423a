"""``fsdpc train``: a language model on text, sharded over ranks, from one command."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdpc import _core, distributed, models
from fsdpc._train_checkpoint import TrainCheckpoints, add_options, check_options
from fsdpc.activation import checkpoint_activations
from fsdpc.amp import LossScaler
from fsdpc.clip import clip_grad_norm_
from fsdpc.data import (
    ByteDataset,
    DistributedSampler,
    GlobalBatchSampler,
    Loader,
    SequenceDataset,
    default_corpus,
)
from fsdpc.full_params import full_tensor
from fsdpc.lr_scheduler import WarmupCosine
from fsdpc.mesh import init_device_mesh
from fsdpc.nn import deferred_init
from fsdpc.optim import SGD, Adam, AdamW, Lion, Optimizer
from fsdpc.policies import MixedPrecisionPolicy
from fsdpc.sharding import fully_shard
from fsdpc.strategies import ShardingStrategy

HELD_OUT_BYTES = 500_000
DTYPES = {"fp32": _core.float32, "bf16": _core.bfloat16, "fp16": _core.float16}
WARM_STEPS = 3  # left out of the rates: first touches of memory, caches filling

_EPILOG = """\
examples:
  fsdpc train --ranks 2      the defaults: a LLaMA of 2 M parameters on Python's own library
  fsdpc train --ranks 2 --preset 10M --data notes/ --steps 2000
  fsdpc train --ranks 4 --dtype fp32 --accumulate 2 --metrics run.jsonl

The data are bytes of text; the last 500 kB (at most a tenth) are held out for the validation loss,
which is printed at the end in nats per byte, with a sample of generated text.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``fsdpc train``."""
    p = argparse.ArgumentParser(
        prog="fsdpc train",
        description="Train a language model on text with fully sharded data parallelism.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = p.add_argument_group("run")
    run.add_argument(
        "--ranks",
        type=int,
        default=None,
        metavar="N",
        help="processes to train on (default: this one, or torchrun's)",
    )
    run.add_argument(
        "--steps", type=int, default=400, metavar="N", help="optimizer steps (default: 400)"
    )
    run.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of weights, data order and dropout (default: 0)",
    )
    run.add_argument("--metrics", type=Path, metavar="FILE", help="write JSON, a line a step")
    run.add_argument(
        "--sample",
        type=int,
        default=300,
        metavar="N",
        help="bytes of text to generate at the end (default: 300)",
    )
    model = p.add_argument_group("model")
    model.add_argument(
        "--model", choices=("llama", "gpt2"), default="llama", help="family (default: llama)"
    )
    model.add_argument(
        "--preset",
        choices=tuple(models.PRESETS),
        default="2M",
        metavar="SIZE",
        help=f"{', '.join(models.PRESETS)} (default: 2M)",
    )
    model.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="bf16",
        help="of compute; masters, sums and states are fp32; fp16 scales the loss (default: bf16)",
    )
    model.add_argument(
        "--checkpoint-activations",
        nargs="?",
        const="all",
        metavar="WHICH",
        help="recompute blocks in backward: all, every N-th, or a ratio like 0.5",
    )
    data = p.add_argument_group("data")
    data.add_argument(
        "--data",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="files and folders (default: Python's own standard library)",
    )
    data.add_argument(
        "--batch",
        type=int,
        default=16,
        metavar="N",
        help="sequences in a micro-step of one rank (default: 16)",
    )
    data.add_argument(
        "--seq", type=int, default=256, metavar="N", help="bytes in a sequence (default: 256)"
    )
    data.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="micro-steps in a step of the optimizer (default: 1)",
    )
    _add_sharding_options(p)
    _add_optimizer_options(p)
    add_options(p)
    p.add_argument("--live", action="store_true", help=argparse.SUPPRESS)
    return p


def _add_sharding_options(p: argparse.ArgumentParser) -> None:
    sharding = p.add_argument_group("sharding")
    sharding.add_argument(
        "--strategy",
        type=str.upper,
        choices=tuple(s.name for s in ShardingStrategy),
        default="FULL_SHARD",
        metavar="NAME",
        help=f"{', '.join(s.name for s in ShardingStrategy)} (default: FULL_SHARD)",
    )
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
    sharding.add_argument(
        "--reduce-dtype",
        choices=tuple(DTYPES),
        default="fp32",
        help="in which gradients are written and sent (default: fp32)",
    )
    sharding.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits however --ranks and --accumulate split the global batch",
    )


def _mesh_shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"a mesh is written as 2x4, got '{text}'")
    return int(parts[0]), int(parts[1])


def _true_false_number(text: str) -> bool | int:
    known = {"true": True, "false": False}
    if text.lower() not in known and not text.isdigit():
        raise argparse.ArgumentTypeError(f"true, false or a number of ranks, got '{text}'")
    return known.get(text.lower(), int(text) if text.isdigit() else 0)


class Choice(NamedTuple):
    """What an optimizer is made by, and its usual learning rate."""

    make: Callable[..., Optimizer]
    lr: float


OPTIMIZERS = {
    "adamw": Choice(partial(AdamW, betas=(0.9, 0.95)), 3e-3),
    "adam": Choice(partial(Adam, betas=(0.9, 0.95)), 3e-3),
    "sgd": Choice(partial(SGD, momentum=0.9), 0.1),
    "lion": Choice(Lion, 3e-4),
}


def _add_optimizer_options(p: argparse.ArgumentParser) -> None:
    optim = p.add_argument_group("optimizer")
    optim.add_argument(
        "--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="(default: adamw)"
    )
    optim.add_argument(
        "--lr",
        type=float,
        metavar="X",
        help="peak learning rate (default: "
        + ", ".join(f"{each.lr:g} for {name}" for name, each in OPTIMIZERS.items()) + ")",
    )
    optim.add_argument(
        "--weight-decay",
        type=float,
        default=0.1,
        metavar="X",
        help="for tensors of two or more dimensions (default: 0.1)",
    )
    optim.add_argument(
        "--clip",
        type=float,
        default=1.0,
        metavar="X",
        help="largest global norm of gradients (default: 1.0)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdpc train`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Options, as on the command line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(arguments)
    try:
        _check(options)
        if options.ranks is not None and options.ranks != 1 and "RANK" not in os.environ:
            from fsdpc import launcher

            if options.data:
                datasets(options)  # what is wrong with them is said once, not by every rank
            live = ["--live"] if sys.stdout.isatty() else []
            return launcher.run(["-m", "fsdpc", "train", *live, *arguments], options.ranks)
        if options.ranks == 1 and "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
        Trainer(options).run()
    except (ValueError, KeyError, OSError) as error:
        if isinstance(error, (TimeoutError, ConnectionError)):
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"fsdpc train: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fsdpc train: interrupted", file=sys.stderr)
        return 130
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("batch", "seq", "accumulate"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    for name in ("steps", "sample"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name} must be at least 0, got {getattr(options, name)}")
    if options.lr is None:
        options.lr = OPTIMIZERS[options.optimizer].lr
    for name in ("lr", "clip"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name} must be above 0, got {getattr(options, name)}")
    if options.ranks is not None:
        from fsdpc._launch.environment import check_ranks

        check_ranks(options.ranks)
    check_options(options)
    if options.checkpoint_activations:
        _checkpoint_choice(options.checkpoint_activations)
    if options.metrics:
        try:
            options.metrics.open("a").close()
        except OSError as error:
            raise type(error)(
                f"cannot write --metrics {options.metrics}: {error.strerror}"
            ) from None


def _checkpoint_choice(text: str) -> str | int | float:
    if text == "all":
        return text
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise ValueError(
            f"--checkpoint-activations takes all, a number of blocks or a ratio, got '{text}'"
        ) from None


def datasets(options: argparse.Namespace) -> tuple[SequenceDataset, SequenceDataset]:
    """Return the sequences to train on and those held out, as the options name them."""
    data = ByteDataset(options.data or default_corpus(), options.seq)
    held_out = min(HELD_OUT_BYTES, max(data.tokens // 10, options.seq + 1))
    return data.split(held_out)


class Trainer:
    """One training run on this rank.

    Parameters
    ----------
    options : argparse.Namespace
        As :func:`parser` returns them.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.train_data, self.val_data = datasets(options)
        if not distributed.is_initialized():
            distributed.init(deterministic=options.deterministic)
        self.rank, self.world = distributed.rank(), distributed.world_size()
        self.model, self.optimizer = self._build()
        self.scaler = LossScaler() if options.dtype == "fp16" else None
        warmup = max(1, options.steps // 20)
        self.schedule = WarmupCosine(
            self.optimizer,
            min(warmup, max(options.steps - 1, 0)),
            max(options.steps, 1),
            min_ratio=0.05,
        )
        self.loader = Loader(self.train_data, options.batch, self._sampler())
        self.tokens_per_step = options.batch * options.seq * options.accumulate * self.world
        self.peak_flops = self._measure_peak() * self.world
        self.flops_per_token = self.model.config.flops_per_token(options.seq)
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule,
                 "scaler": self.scaler, "data": self.loader}  # fmt: skip
        self.checkpoints = TrainCheckpoints(options, state)
        mode = "a" if options.resume else "w"
        self.metrics = open(options.metrics, mode) if options.metrics and self.rank == 0 else None

    def _sampler(self) -> DistributedSampler:
        o, length, place = self.options, len(self.train_data), (self.rank, self.world)
        if o.deterministic:
            return GlobalBatchSampler(length, *place, o.batch, o.accumulate, seed=o.seed)
        return DistributedSampler(length, *place, shuffle=True, seed=o.seed, drop_last=True)

    def _build(self) -> tuple[Any, Optimizer]:
        o = self.options
        config = models.preset(o.preset)
        config = config.with_(max_seq=max(config.max_seq, o.seq))
        _core.manual_seed(o.seed)
        with deferred_init():
            model = models.Llama(config) if o.model == "llama" else models.GPT2(config)
        if o.checkpoint_activations:
            checkpoint_activations(model.blocks(), _checkpoint_choice(o.checkpoint_activations))
        policy = MixedPrecisionPolicy(
            param_dtype=None if o.dtype == "fp32" else DTYPES[o.dtype],
            reduce_dtype=DTYPES[o.reduce_dtype],
        )
        mesh = init_device_mesh("cpu", o.mesh) if o.mesh else None
        sharding: dict[str, Any] = {
            "mesh": mesh,
            "strategy": o.strategy,
            "reshard_after_forward": o.reshard_after_forward,
            "mp_policy": policy,
        }
        for block in model.blocks():
            fully_shard(block, **sharding)
        fully_shard(model, **sharding)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return model, OPTIMIZERS[o.optimizer].make(groups, lr=o.lr)

    def _measure_peak(self) -> float:
        """FLOP/s of this rank's matrix products: what MFU is a share of."""
        dtype = DTYPES[self.options.dtype]
        n = 768
        a, b = (_core.randn(n, n, seed=i).to(dtype) for i in (1, 2))
        best = math.inf
        previous = _core.set_grad_enabled(False)
        for _ in range(4):
            begin = time.perf_counter()
            _core.matmul(a, b)
            best = min(best, time.perf_counter() - begin)
        _core.set_grad_enabled(previous)
        return 2 * n**3 / best

    def run(self) -> None:
        """Train, validate, write metrics, show a sample."""
        o = self.options
        begin = time.perf_counter()
        line = LiveLine(self, begin)
        try:
            step = self.checkpoints.begin()
            with self.loader:
                while step < o.steps:
                    step += 1
                    line.show(step, self._step())
                    if self.checkpoints.after(step):
                        break
            line.end()
            self.checkpoints.end(step)
            if self.checkpoints.stopped:
                return
            val_loss, val_tokens = self.validate()
            seconds = time.perf_counter() - begin
            crc = self._params_crc()
            if self.rank == 0:
                last = {"val_loss": val_loss, "val_tokens": val_tokens, "seconds": seconds,
                        "params_crc32c": f"{crc:08x}"}  # fmt: skip
                self._write(last)
                print(f"validation loss {val_loss:.4f} nats per byte over {val_tokens:,} bytes, "
                      f"{seconds:.1f} s in all, parameters crc32c {crc:08x}")  # fmt: skip
            self._show_sample()
        finally:
            if self.metrics:
                self.metrics.close()

    def _step(self) -> dict[str, float]:
        o, world = self.options, distributed.world()
        begin, waited, data = time.perf_counter(), world.waited_ns, self.loader.wait_seconds
        losses = []
        self.optimizer.zero_grad()
        for micro in range(o.accumulate):
            if o.strategy == "SHARD_OPTIM" and o.accumulate > 1:
                self.model.set_requires_gradient_sync(micro == o.accumulate - 1)
            x, y = next(self.loader)
            loss = self.model(x, y)
            part = loss / o.accumulate if o.accumulate > 1 else loss
            (self.scaler.scale(part) if self.scaler else part).backward()
            losses.append(float(loss))
        lr = self.optimizer.param_groups[0]["lr"]
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
            norm = clip_grad_norm_(self.model, o.clip)
            self.scaler.step(self.optimizer)  # not where a gradient overflowed
            self.scaler.update()
        else:
            norm = clip_grad_norm_(self.model, o.clip, error_if_nonfinite=True)
            self.optimizer.step()
        self.schedule.step()
        seconds = time.perf_counter() - begin
        return {
            "loss": distributed.all_reduce(float(np.mean(losses)), "mean"),
            "grad_norm": float(norm),
            "lr": lr,
            "seconds": seconds,
            "comm_ms": (world.waited_ns - waited) / 1e6,
            "data_ms": (self.loader.wait_seconds - data) * 1e3,
        }

    def validate(self) -> tuple[float, int]:
        """Return the loss in nats a byte over the held-out bytes, and how many those are."""
        o, data = self.options, self.val_data
        batches = [range(i, min(i + o.batch, len(data))) for i in range(0, len(data), o.batch)]
        rounds = math.ceil(len(batches) / self.world)
        total, tokens = 0.0, 0
        previous = _core.set_grad_enabled(False)
        self.model.eval()
        for i in range(rounds):
            mine = i * self.world + self.rank
            counted = mine < len(batches)  # all ranks run as many forwards: gathers are collective
            x, y = data.batch(list(batches[mine if counted else 0]))
            loss = float(self.model(x, y))
            if counted:
                total += loss * y.size
                tokens += y.size
        self.model.train()
        _core.set_grad_enabled(previous)
        sums = distributed.all_reduce(np.array([total, float(tokens)]))
        return float(sums[0] / sums[1]), int(sums[1])

    def _params_crc(self) -> int:
        crc = 0
        for _, p in sorted(self.model.named_parameters()):
            full = full_tensor(p).to(_core.float32)
            crc = _core.crc32c(crc, full.numpy())
        return crc

    def _show_sample(self) -> None:
        n = self.options.sample
        if n == 0:
            return
        prompt = np.frombuffer(b"def ", dtype=np.uint8)
        ids = models.generate(
            self.model, prompt, n, context=self.options.seq, seed=self.options.seed
        )
        if self.rank == 0:
            text = bytes(ids.astype(np.uint8)).decode("utf-8", "replace")
            print("---- sample ----\n" + text)

    def _write(self, record: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.write(json.dumps(record) + "\n")
            self.metrics.flush()


class LiveLine:
    """How training goes: one line, rewritten in a terminal, printed now and then elsewhere."""

    def __init__(self, trainer: Trainer, begin: float) -> None:
        self.trainer, self.begin = trainer, begin
        self.live = trainer.options.live or sys.stdout.isatty()
        self.shown = 0.0
        self.rated_steps, self.rated_seconds = 0, 0.0
        self.width = 0

    def show(self, step: int, m: dict[str, float]) -> None:
        """Take a step's measurements; write metrics and, when it is time, the line."""
        t = self.trainer
        if step > min(WARM_STEPS, t.options.steps - 1):
            self.rated_steps += 1
            self.rated_seconds += m["seconds"]
        rate = (
            t.tokens_per_step * self.rated_steps / self.rated_seconds if self.rated_steps else 0.0
        )
        mfu = rate * t.flops_per_token / t.peak_flops
        if t.rank != 0:
            return
        peak = _core.memory_stats()["total_peak_bytes"]
        now_rate = t.tokens_per_step / m["seconds"]
        t._write({
            "step": step, "loss": m["loss"], "tokens_per_second": now_rate,
            "grad_norm": m["grad_norm"] if math.isfinite(m["grad_norm"]) else None, "lr": m["lr"],
            "mfu": now_rate * t.flops_per_token / t.peak_flops, "peak_bytes": peak,
            "comm_ms": m["comm_ms"], "data_ms": m["data_ms"],
            **({"loss_scale": t.scaler.get_scale()} if t.scaler else {}),
        })  # fmt: skip
        now = time.perf_counter()
        last = step == t.options.steps
        if now - self.shown < (0.1 if self.live else 5.0) and not last and step > 1:
            return
        self.shown = now
        text = (
            f"step {step}/{t.options.steps}  loss {m['loss']:.4f}  {rate:,.0f} tokens/s  "
            f"norm {m['grad_norm']:.3f}  lr {m['lr']:.2e}  MFU {mfu:.1%}  "
            f"memory {peak / 2**20:,.0f} MiB  {now - self.begin:.0f} s"
        )
        if self.live:
            padding = " " * max(0, self.width - len(text))
            self.width = len(text)
            sys.stdout.write(text + padding + ("\n" if last else "\r"))
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Say where the time of a step went, on average."""
        t = self.trainer
        if t.rank == 0 and self.rated_steps:
            print(f"{self.rated_seconds / self.rated_steps * 1e3:.1f} ms a step on average, "
                  f"{t.world} rank{'s' if t.world > 1 else ''}, "
                  f"{t.model.num_parameters():,} parameters, "
                  f"measured peak {t.peak_flops / 1e9:,.0f} GFLOP/s")  # fmt: skip
