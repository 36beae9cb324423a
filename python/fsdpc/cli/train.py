"""``fsdpc train``: train a language model on text, sharded over ranks."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any

import numpy as np

from fsdpc import _core, distributed, models
from fsdpc.checkpoint.trained import Trained, parameters_crc
from fsdpc.cli import train_pretrained
from fsdpc.cli.train_checkpoint import TrainCheckpoints
from fsdpc.cli.train_config import as_toml, changes, kept_options, parse
from fsdpc.cli.train_options import (
    DTYPES,
    STATE_DTYPES,
    ActivationMemory,
    check,
    checkpoint_choice,
    keep_global_batch,
    make_schedule,
    mesh_shape,
    most_ranks,
)
from fsdpc.cli.train_progress import Progress, live
from fsdpc.cli.train_tokens import IGNORED, Bytes, Tokens, evaluation, make_source, with_vocabulary
from fsdpc.data import DistributedSampler, GlobalBatchSampler, Loader, SequenceDataset
from fsdpc.distributed import hosts
from fsdpc.distributed.environment import adopt_scheduler, available_bytes
from fsdpc.monitor.loggers import Loggers, open_loggers
from fsdpc.monitor.performance import measure_peak
from fsdpc.monitor.plots import LivePlot
from fsdpc.monitor.profiler import ProfiledSteps
from fsdpc.monitor.stabilizer import TrainingStabilizer
from fsdpc.nn import deferred_init
from fsdpc.optim import BY_NAME, Adafactor, Muon, Optimizer
from fsdpc.optim.ema import EMA
from fsdpc.optim.lr_scheduler import LRScheduler
from fsdpc.optim.matrix import takes_muon
from fsdpc.planning.fit_activations import fit_activations
from fsdpc.planning.memory_plan import MemoryPlan, memory_plan
from fsdpc.sharding.activation import checkpoint_activations
from fsdpc.sharding.amp import LossScaler
from fsdpc.sharding.clip import clip_grad_norm_
from fsdpc.sharding.fully_shard import fully_shard
from fsdpc.sharding.mesh import init_device_mesh
from fsdpc.sharding.policies import MixedPrecisionPolicy
from fsdpc.sharding.tiles import tile_tokens
from fsdpc.tensors.device import set_default_device
from fsdpc.tensors.grad_mode import no_grad

PLOT_S = 60.0  # between two drawings; all ranks wait for each
# Control characters in samples are replaced, because an undertrained model may print terminal
# escapes.
_SHOWN = {**dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd"), ord("\r"): None}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fsdpc train`` and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Command-line options.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parse(arguments)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher blocked it
        adopt_scheduler(os.environ)
        check(options)
        choose_device(options)
        if options.hosts is not None and "RANK" not in os.environ:
            names, each = hosts.check_hosts(options.hosts, options.ranks, None)
            hosts.run(["-m", "fsdpc", "train", *arguments], names, each,
                      launcher=options.launcher, agent=options.agent)  # fmt: skip
        if "RANK" not in os.environ:  # only one rank reports the error
            check_resources(options, most_ranks(options))
            check_unclaimed(options)
        single = options.ranks in (None, 1) and not options.max_restarts
        if not single and "RANK" not in os.environ:
            from fsdpc.launching import launcher

            return launcher.run(
                ["-m", "fsdpc", "train", *live(options), *arguments], most_ranks(options),
                max_restarts=options.max_restarts, again=["--resume"],
                least=options.elastic and options.elastic.least,
            )  # fmt: skip
        if options.ranks == 1 and "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
        Trainer(options).run()
    except (
        ValueError, KeyError, OSError, MemoryError, FloatingPointError, NotImplementedError
    ) as error:
        if isinstance(error, (TimeoutError, ConnectionError)):
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"fsdpc train: {text}", file=sys.stderr)
        return 2
    except _core.PeerError as error:  # the peer reports where; the launcher recognises this message
        print(f"fsdpc train: PeerError: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fsdpc train: interrupted", file=sys.stderr)
        return 130
    return 0


def choose_device(options: argparse.Namespace) -> None:
    """Apply ``--device``; must run before the first tensor is created."""
    try:
        set_default_device(options.device)
    except RuntimeError as error:
        raise ValueError(f"--device {options.device}: {error}") from None


def check_resources(options: argparse.Namespace, ranks: int) -> None:
    """Raise if this machine has too little memory or the data are too short."""
    plan = plan_memory(options, make_model(options), ranks)
    replicas = mesh_shape(options, ranks)[0]
    each = plan.total - plan.unsharded
    needed, available = replicas * plan.unsharded + ranks * each, available_bytes()
    if options.device == "cpu" and available is not None and needed > available:
        model = f"--preset {options.preset}"
        if options.init_from is not None:
            model = f"--init-from {options.init_from}"
        raise ValueError(
            f"{model} on {ranks} rank{'s' if ranks > 1 else ''} needs "
            f"{needed / 2**30:,.1f} GiB without its activations, {available / 2**30:,.1f} GiB are "
            "available: take a smaller model, or a strategy that shards more"
        )
    found = make_source(options).check()
    if found is not None:
        length = len(found[0])
        whole = options.batch * (options.accumulate if options.deterministic else 1)
        if length // ranks < whole:
            raise ValueError(
                f"the data have {length} sequences of {options.seq} to train on, {ranks} x {whole} "
                "of them are a batch: take a smaller --batch or --seq, or more data"
            )


def check_unclaimed(options: argparse.Namespace) -> None:
    """Raise if another run has claimed the checkpoint folder; called once for all ranks."""
    if options.checkpoint is not None and options.checkpoint.is_dir():
        from fsdpc.checkpoint.claim import claim_folder

        claim_folder(options.checkpoint).release()


def plan_memory(
    options: argparse.Namespace, model: Any, ranks: int, batch_shape: tuple[int, int] | None = None
) -> MemoryPlan:
    """Return each rank's memory plan, including activations if there is a batch."""
    reshard = options.reshard_after_forward
    block = type(model.blocks()[0])
    of_block = {} if reshard is None else {"reshard_after_forward": reshard}
    return memory_plan(
        model,
        mesh_shape(options, ranks),
        batch_shape,
        strategy=options.strategy,
        plan=lambda _, module: of_block if isinstance(module, block) else None,
        mp_policy=make_policy(options),
        optimizer=1 if options.optimizer == "sgd" else options.optimizer,  # for momentum
        offload_policy=options.offload,
        compression=options.compress,
        state_dtype=STATE_DTYPES[options.state_dtype],
        ema=options.ema is not None,
    )


def make_model(options: argparse.Namespace, config: models.ModelConfig | None = None) -> Any:
    """Return a model without memory, from a preset or shape, with recomputation if requested."""
    config = config or train_pretrained.config_for(options)
    config = with_vocabulary(options, config)
    config = config.with_(max_seq=max(config.max_seq, options.seq))
    with deferred_init():
        model = models.Llama(config) if options.model == "llama" else models.GPT2(config)
        train_pretrained.adapt(options, model)
    if options.tile_tokens is not None:
        tile_tokens([block.mlp for block in model.blocks()], options.tile_tokens)
    if options.checkpoint_activations:
        which = checkpoint_choice(options.checkpoint_activations)
        if isinstance(which, ActivationMemory):
            options.fitted = fit_activations(model, (options.batch, options.seq), which.bytes,
                                             mp_policy=make_policy(options),
                                             offload_policy=options.offload)  # fmt: skip
        elif which == "products":
            checkpoint_activations(model.blocks(), save=which)
        else:
            checkpoint_activations(model.blocks(), which)
    return model


def make_policy(options: argparse.Namespace) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy that specifies the compute and reduction dtypes."""
    return MixedPrecisionPolicy(
        param_dtype=None if options.dtype == "fp32" else DTYPES[options.dtype],
        reduce_dtype=DTYPES[options.reduce_dtype],
    )


class Trainer:
    """A training run on this rank, with the options from :func:`parse`."""

    train_data: SequenceDataset
    val_data: SequenceDataset
    model: Any
    optimizer: Optimizer

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.source: Bytes | Tokens = make_source(options)
        self.train_data, self.val_data = self.source.datasets()
        if not distributed.is_initialized():
            distributed.init(deterministic=options.deterministic)
        self.rank: int = distributed.rank()
        self.world: int = distributed.world_size()
        text, kept = as_toml(options), kept_options(options)
        said = keep_global_batch(options, self.world)
        if said and self.rank == 0:
            print(said, flush=True)
        # The divisor of losses; in deterministic mode the engine divides sums, see
        # distributed.init().
        self.divisor = 1 if options.deterministic else options.accumulate
        self.model, self.optimizer = self._build()
        self.scaler: LossScaler | None = LossScaler() if options.dtype == "fp16" else None
        self.ema: EMA | None = None if options.ema is None else EMA(self.model, options.ema)
        self.schedule: LRScheduler = make_schedule(options, self.optimizer)
        self.stabilizer: TrainingStabilizer | None = None
        if options.stabilize:
            self.stabilizer = TrainingStabilizer(self.model, self.optimizer, options.clip)
        self.loader: Loader = Loader(self.train_data, options.batch, self._sampler())
        self.tokens_per_step: int = options.batch * options.seq * options.accumulate * self.world
        self.peak_flops: float = measure_peak(DTYPES[options.dtype]) * self.world
        self.flops_per_token: float = self.model.config.flops_per_token(options.seq)
        held = self.model if options.lora is None else Trained(self.model)
        state = {"model": held, "optimizer": self.optimizer, "ema": self.ema,
                 "scheduler": self.schedule, "scaler": self.scaler, "data": self.loader,
                 "extra": {"tokenizer": self.source.identity, "options": kept}}  # fmt: skip
        self.checkpoints: TrainCheckpoints = TrainCheckpoints(options, state, text)
        self.progress: Progress = Progress(self)
        steps = options.profile or range(0)
        self.profiled: ProfiledSteps = ProfiledSteps(steps, options.profile_file, self.model)
        mode = "a" if options.resume else "w"
        self.metrics: IO[str] | None = None
        if options.metrics and self.rank == 0:
            self.metrics = open(options.metrics, mode, encoding="utf-8")
        self.loggers: Loggers = open_loggers(options.log) if options.log else Loggers([])
        if options.plot and self.rank == 0:
            self.loggers.loggers.append(self._plot())

    def _plot(self) -> LivePlot:
        """Return the plotting logger, which includes a resumed run's earlier measurements."""
        plot, metrics = LivePlot(self.options.plot, every=PLOT_S), self.options.metrics
        if self.options.resume and metrics and metrics.stat().st_size:
            plot.add_file(metrics)
        return plot

    def _sampler(self) -> DistributedSampler:
        o, length, place = self.options, len(self.train_data), (self.rank, self.world)
        if o.deterministic:
            return GlobalBatchSampler(length, *place, o.batch, o.accumulate, seed=o.seed)
        return DistributedSampler(length, *place, shuffle=True, seed=o.seed, drop_last=True)

    def _build(self) -> tuple[Any, Optimizer]:
        o = self.options
        _core.manual_seed(o.seed)
        model = make_model(o)
        mesh = init_device_mesh(o.device, o.mesh) if o.mesh else None
        sharding: dict[str, Any] = {
            "mesh": mesh,
            "strategy": o.strategy,
            "reshard_after_forward": o.reshard_after_forward,
            "mp_policy": make_policy(o),
            "offload_policy": o.offload,
            "compression": o.compress,
        }
        for block in model.blocks():
            fully_shard(block, **sharding)
        fully_shard(model, **sharding)
        if o.init_from is not None:
            models.load_pretrained(model, o.init_from)
        if self.divisor != o.accumulate:
            for m in (*model.blocks(), model):
                m.set_gradient_divide_factor(self.world * o.accumulate)
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim >= 2]
        vectors = [p for p in trained if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        make = BY_NAME[o.optimizer]
        if make is Muon:
            return model, Muon(self._muon_groups(model, groups), lr=o.lr)
        given = {"lr": o.lr, **({"betas": tuple(o.betas)} if o.betas else {})}
        if make is not Adafactor:
            given["state_dtype"] = STATE_DTYPES[o.state_dtype]
        options = {**make._USUAL, **given}
        return model, make(groups, **options)

    def _muon_groups(self, model: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups for Muon, whose updates are scaled so that AdamW's rate fits."""
        o = self.options
        chosen = takes_muon(model)
        muon = [p for p in groups[0]["params"] if id(p) in chosen]
        adamw = {"use_muon": False, "lr": o.lr, "betas": o.betas or Muon._USUAL["betas"]}
        others = [{**g, **adamw, "params": [p for p in g["params"] if id(p) not in chosen]}
                  for g in groups]  # fmt: skip
        return [{**groups[0], "params": muon, "adjust_lr_fn": "match_rms_adamw"}, *others]

    def run(self) -> None:
        """Train, validate, write metrics and print a sample."""
        o = self.options
        begin = time.perf_counter()
        self._show_header()
        self.progress.open()
        try:
            step = self.checkpoints.begin(changes)
            train_pretrained.keep_tokenizer(self.source.tokenizer, o.checkpoint)
            with self.loader:
                while step < o.steps:
                    step += 1
                    with self.profiled.step(step):
                        measured = self._step()
                    self.progress.show(step, measured)
                    if self.stabilizer and self.stabilizer.gave_up:
                        step = self.checkpoints.go_back(self.stabilizer)
                        continue
                    if o.eval_every and step % o.eval_every == 0 and step < o.steps:
                        with self._averages():
                            self._write({"step": step, **self._validation(step)})
                    healthy = not self.stabilizer or self.stabilizer.in_a_row == 0
                    if self.checkpoints.after(step, healthy):
                        break
            self.progress.end()
            self.profiled.end()
            self.checkpoints.end(step)
            if self.checkpoints.stopped:
                return
            with self._averages():
                train_pretrained.export(o, self.model, self.source.tokenizer)
                last = self._validation()
            seconds = time.perf_counter() - begin
            crc = parameters_crc(self.model.named_parameters())
            if last:
                self.loggers.log(step, last)
            if self.rank == 0:
                self._write({**last, "seconds": seconds, "params_crc32c": f"{crc:08x}"})
                print(f"{seconds:.1f} s in all, parameters crc32c {crc:08x}")
            with self._averages():
                self._show_sample()
        finally:
            self.progress.close()
            if self.metrics:
                self.metrics.close()
            self.loggers.close()

    def _averages(self) -> AbstractContextManager[None]:
        """Compute with the averaged weights inside the block, if there are any."""
        averaged = self.ema is not None and self.ema.num_updates > 0
        return self.ema.swap() if averaged else nullcontext()  # type: ignore[union-attr]

    def _validation(self, step: int | None = None) -> dict[str, Any]:
        """Run a validation, report its result, and return it as metrics."""
        if not self.options.eval_bytes:
            return {}
        text, record = evaluation(*self.validate(), self.source.unit)
        if step is None:
            text += f", perplexity {record['val_perplexity']:.4g}"
        else:  # a shorter line; omitted values follow from the loss
            text = f"step {step}: {text}"
        if self.rank == 0:
            print(text, flush=True)
        return record

    def _show_header(self) -> None:
        if self.rank == 0:
            o, data = self.options, self.train_data
            title, parameters = train_pretrained.title(o), self.model.num_parameters()
            print(f"{title}: {parameters:,} parameters, {o.dtype}, "
                  f"{self.world} rank{'s' if self.world > 1 else ''}, {o.strategy}\n"
                  f"{data.tokens:,} {self.source.header()}"
                  f"{self.tokens_per_step:,} a step, {self.val_data.tokens:,} held out",
                  flush=True)  # fmt: skip
            if fitted := getattr(o, "fitted", None):
                print(f"activations: {fitted}", flush=True)

    def _step(self) -> dict[str, Any]:
        o, world = self.options, distributed.world()
        begin, waited, data = time.perf_counter(), world.waited_ns, self.loader.wait_seconds
        losses = []
        self.optimizer.zero_grad()
        for micro in range(o.accumulate):
            if o.strategy == "SHARD_OPTIM" and o.accumulate > 1:
                self.model.set_requires_gradient_sync(micro == o.accumulate - 1)
            x, y = next(self.loader)
            loss = self.model(x, y, **self.source.arguments(x))
            watched = self.stabilizer.watch(loss) if self.stabilizer else loss
            part = watched / self.divisor if self.divisor > 1 else watched
            (self.scaler.scale(part) if self.scaler else part).backward()
            losses.append(float(loss))
        lr = self.optimizer.param_groups[0]["lr"]
        norm: Any
        skipped = ""
        if self.stabilizer:
            done = self.stabilizer.step()
            norm, skipped = done.norm, done.reason
        elif self.scaler:
            self.scaler.unscale_(self.optimizer)
            norm = clip_grad_norm_(self.model, o.clip)
            self.scaler.step(self.optimizer)  # skipped if a gradient overflowed
            self.scaler.update()
        else:
            norm = clip_grad_norm_(self.model, o.clip)
            if not math.isfinite(float(norm)):
                raise FloatingPointError(
                    f"training diverged: the norm of the gradients is {float(norm)}, after losses "
                    f"of {losses}; take a lower --lr"
                )
            self.optimizer.step()
        if self.ema:
            self.ema.update()
        self.schedule.step()
        seconds = time.perf_counter() - begin
        return {
            "skipped": skipped,
            # Sum in global batch order, so that ranks and micro-steps do not affect the result.
            "loss": float(np.mean(distributed.all_gather(np.array(losses)).T.ravel())),
            "grad_norm": float(norm),
            "lr": lr,
            "seconds": seconds,
            "comm_ms": (world.waited_ns - waited) / 1e6,
            "data_ms": (self.loader.wait_seconds - data) * 1e3,
        }

    @no_grad()
    def validate(self) -> tuple[float, int, int]:
        """Return the mean loss in nats over ``--eval-bytes``, and the numbers of targets and bytes.

        The number of bytes is 0 if there is no tokenizer to count them.
        """
        o, data = self.options, self.val_data
        length = min(len(data), max(1, o.eval_bytes // o.seq))
        batches = [range(i, min(i + o.batch, length)) for i in range(0, length, o.batch)]
        rounds = math.ceil(len(batches) / self.world)
        found = np.zeros((rounds, 3))
        self.model.eval()
        for i in range(rounds):
            mine = i * self.world + self.rank
            counted = mine < len(batches)  # equal on all ranks, because gathers are collective
            x, y = data.batch(list(batches[mine if counted else 0]))
            loss = float(self.model(x, y, **self.source.arguments(x)))
            targets = np.count_nonzero(y != IGNORED)
            if counted and targets:
                found[i] = loss * targets, targets, self.source.text_bytes(y)
            self.progress.show_validation(i + 1, rounds)
        self.model.train()
        # Sum in batch order, so that the result does not depend on the number of ranks.
        everyones = distributed.all_gather(found).swapaxes(0, 1).reshape(-1, 3)
        sums = everyones[: len(batches)].sum(axis=0)
        return float(sums[0] / sums[1]), int(sums[1]), int(sums[2])

    def _show_sample(self) -> None:
        n = self.options.sample
        if n == 0:
            return
        try:
            decode = self.source.decoder()
        except ImportError as error:
            if self.rank == 0:
                print(f"no sample: {error}")
            return

        def show(text: str) -> None:
            if self.rank == 0:
                print(text.translate(_SHOWN), end="", flush=True)

        prompt = self.source.prompt
        show("---- sample ----\n" + "".join(decode(int(word)) for word in prompt))
        for word in self._sample(prompt, n):
            show(decode(word))
        show("\n")

    def _sample(self, prompt: np.ndarray, n: int) -> Iterator[int]:
        """Yield `n` tokens; when the context is full, drop its first half and continue."""
        ids = [int(word) for word in prompt]
        seq = self.options.seq  # the longest context in training
        end = len(ids) + n
        while len(ids) < end:
            window = ids[-max(1, seq // 2) :]
            count = min(end - len(ids), seq - len(window))
            if count < 1:
                return
            seed = self.options.seed + len(ids)
            for (word,) in self.model.stream(
                window, count, temperature=0.8, seed=seed, stop=()
            ):
                ids.append(word)
                yield word

    def _write(self, record: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.write(json.dumps(record) + "\n")
            self.metrics.flush()
        if "step" in record:
            self.loggers.log(record["step"], {k: v for k, v in record.items() if k != "step"})
