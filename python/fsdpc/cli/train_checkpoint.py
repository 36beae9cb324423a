"""Checkpoints of ``fsdpc train``: resuming, saving, and stopping at a signal."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdpc import distributed
from fsdpc.cli.train_tokens import check_resumed
from fsdpc.launching.elastic import parse_elastic
from fsdpc.monitor.stabilizer import TrainingStabilizer

OPTIONS = "run.toml"
AS_NAMES: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}  # options' text
RETURNS = 3  # maximum returns to one checkpoint
# A checkpoint without a scaler is not from an fp16 run; this run's scaler starts at its initial
# scale. In one without averages, they start at the next step.
_RESTORE: dict[str, Any] = {"optional": ("scaler", "ema")}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint options for ``fsdpc train``."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save there at the end, and when SIGTERM or SIGUSR1 asks the run to stop",
    )
    group.add_argument(
        "--save-every", type=int, metavar="N", help="save after every N steps as well"
    )
    group.add_argument("--save-hours", type=float, metavar="X", help="save every X hours as well")
    group.add_argument(
        "--keep", type=int, metavar="N", help="keep the newest N checkpoints (default: all)"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest valid checkpoint in DIR, if there is one; what that decides is "
        "listed below",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="when a rank fails, start all again and resume, at most N times (default: 0)",
    )
    group.add_argument(
        "--elastic",
        type=parse_elastic,
        metavar="MIN:MAX",
        help="start MAX ranks, in the place of --ranks; when one was killed go on with one fewer, "
        "never below MIN, and with the same global batch where it divides",
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise if options contradict each other."""
    for name in ("save_every", "keep"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    hours = options.save_hours
    if hours is not None and not hours > 0:
        raise ValueError(f"--save-hours must be above 0, got {hours}")
    wants = options.resume or options.save_every or hours or options.keep
    if options.checkpoint is None and wants:
        raise ValueError("--resume, --save-every, --save-hours and --keep need --checkpoint DIR")
    if options.max_restarts < 0:
        raise ValueError(f"--max-restarts must be at least 0, got {options.max_restarts}")
    if options.elastic is not None:
        _check_elastic(options)
    if not options.max_restarts or "FSDPC_LAUNCHER_PID" in os.environ:
        return
    if options.checkpoint is None or not (options.save_every or hours):
        raise ValueError("--max-restarts needs --checkpoint DIR and --save-every N to go on from")
    if "RANK" in os.environ or options.hosts is not None:
        raise ValueError("--max-restarts is for ranks that fsdpc train starts, on one host")


def _check_elastic(options: argparse.Namespace) -> None:
    given = f"--elastic {options.elastic}"
    if options.ranks is not None:
        raise ValueError(f"{given} says how many ranks: leave --ranks {options.ranks} out")
    if options.mesh is not None:
        raise ValueError(f"{given}: a --mesh is of one number of ranks: leave one of them out")
    if not options.max_restarts:
        raise ValueError(f"{given} needs --max-restarts N")


class TrainCheckpoints:
    """Manages the checkpoints of ``fsdpc train``; does nothing without ``--checkpoint``.

    The state is that of :func:`fsdpc.checkpoint.save`, with ``"tokenizer"`` and ``"options"`` in
    its ``"extra"``. ``text`` contains the run's options and is saved next to its checkpoints.
    """

    def __init__(self, options: argparse.Namespace, state: dict[str, Any], text: str) -> None:
        self.options: argparse.Namespace = options
        self.state: dict[str, Any] = state
        self.text: str = text
        self._groups = [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in state["optimizer"].param_groups
        ]
        self.stopped: bool = False
        self._saved: int | None = None
        self._began: int | None = None
        self._resumed: Path | None = None
        self._returned_to, self._returns = -1, 0
        self._manager: Any = None
        self._signals: Any = None

    def begin(self, changes: Callable[[Any, Any, int], str]) -> int:
        """Load the checkpoint to resume from, and return the number of steps already taken.

        ``changes`` is the function from ``train_config`` that reports differences from the earlier
        run.
        """
        o = self.options
        if o.checkpoint is None:
            return 0
        from fsdpc.checkpoint import CheckpointManager, manifest
        from fsdpc.checkpoint.stops import StopSignals

        self._manager = CheckpointManager(
            o.checkpoint, max_to_keep=o.keep, every_steps=o.save_every,
            every_seconds=None if o.save_hours is None else o.save_hours * 3600,
        )  # fmt: skip
        self._manager.claim()
        self._signals = StopSignals()
        latest = self._manager.latest()
        step, changed, zeroed, self._resumed = None, "", list[str](), latest
        if latest is not None:
            content = manifest.read(latest)
            extra, loader = self.state["extra"], self.state["data"]
            check_resumed(latest, content, extra["tokenizer"], len(loader.dataset))
            step = self._restore()
            self._resumed = self._manager.restored  # an older checkpoint if the newest is damaged
            content = manifest.read(self._resumed)
            changed = changes(content, extra["options"], distributed.world_size())
            zeroed = self._manager.report.zeroed
        elif o.resume:
            self._manager.restore(self.state, **_RESTORE)  # raises if all are damaged
        if distributed.rank() == 0 and o.resume:
            found = "nothing to resume" if step is None else f"resumed after step {step}"
            print(f"{found} in {o.checkpoint}" + (f", with {changed}" if changed else ""))
            if zeroed:
                print(f"what {len(zeroed)} sums of compression had kept begins at zero: {zeroed[0]}"
                      + (", ..." if zeroed[1:] else ""))  # fmt: skip
        self._saved = self._began = step
        if distributed.rank() == 0:
            (o.checkpoint / OPTIONS).write_text(self.text, **AS_NAMES)
        return step or 0

    def _restore(self) -> int:
        """Load the newest checkpoint, keeping this run's optimizer options."""
        step = self._manager.restore(self.state, **_RESTORE)
        self._keep_options()
        return step

    def _keep_options(self) -> None:
        for group, own in zip(self.state["optimizer"].param_groups, self._groups, strict=True):
            group.update(own)
        schedule = self.state["scheduler"]
        schedule.load_state_dict(schedule.state_dict())  # sets the learning rates again

    def go_back(self, stabilizer: TrainingStabilizer) -> int:
        """Load the newest checkpoint and return its step. Collective."""
        if self._manager is None:
            raise FloatingPointError(
                f"training diverged: {stabilizer.in_a_row} steps in a row were skipped, and there "
                "is no --checkpoint to go back to; take a lower --lr"
            )
        step = stabilizer.go_back(self._manager, self.state, **_RESTORE)
        self._keep_options()
        self._returns = self._returns + 1 if step == self._returned_to else 1
        if self._returns > RETURNS:
            raise FloatingPointError(
                f"training diverged: {RETURNS} times it went back to step {step}, and did not get "
                "beyond its skipped steps; --resume with a lower --lr"
            )
        self._saved = self._returned_to = step
        if distributed.rank() == 0:
            print(f"went back to step {step} in {self.options.checkpoint}, with another order")
        return step

    def after(self, step: int, healthy: bool) -> bool:
        """Save the state if it is healthy and a save is due; return whether the run must stop.
        Collective."""
        if self._manager is None:
            return False
        self.stopped = self._signals.agree()
        if healthy and self._manager.step(step, self.state):
            self._saved = step
        return self.stopped

    def end(self, step: int) -> None:
        """Save the state after the last step, even if no save is due. Collective."""
        if self._manager is None:
            return
        if self._saved != step:
            self._manager.save(step, self.state)
        if not self.stopped:  # a rank may get a signal twice: the launcher forwards it
            self._signals.restore()
        if distributed.rank() != 0:
            return
        if step == self._began:
            print(f"nothing was left to train: --steps {self.options.steps}, {self._resumed}")
            return
        text = f"stopped by {self._signals.name}" if self.stopped else "saved"
        print(f"{text} after step {step}: {self._manager.path(step)}")
