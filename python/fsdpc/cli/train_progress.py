"""The progress display of ``fsdpc train``.

In a terminal, it is one line at the bottom: a tqdm bar, or text if tqdm is not installed.
Otherwise, or with ``--no-progress``, it prints a line every few seconds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fsdpc import _core
from fsdpc.launching.screen import Screen, above, columns
from fsdpc.monitor.compression import compression_report

if TYPE_CHECKING:
    from fsdpc.cli.train import Trainer

LINE_WIDTH = 76  # of lines that are never rewritten
PREFIX_WIDTH = 5  # of the launcher's prefix, such as "[12] "
WARM_STEPS = 3  # excluded from rates: first memory accesses, cold caches
LIVE_S, PLAIN_S = 0.1, 5.0  # between two lines
BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, ETA {remaining}{postfix}]"


def live(options: argparse.Namespace) -> list[str]:
    """Return the options that tell ranks the terminal's width, if stdout is a terminal."""
    if options.no_progress or not sys.stdout.isatty():
        return []
    return ["--live", str(columns(sys.stdout) - PREFIX_WIDTH)]


class Progress:
    """A run's progress: metrics for every step, and a line on rank 0 from time to time."""

    def __init__(self, trainer: Trainer) -> None:
        o = trainer.options
        self.trainer = trainer
        terminal = bool(o.live or sys.stdout.isatty()) and not o.no_progress
        self.screen: Screen | None = Screen(sys.stdout) if terminal and trainer.rank == 0 else None
        self.meter: Callable[..., str] | None = _find_meter() if self.screen else None
        self.shown: float = 0.0
        self.rated_steps: int = 0
        self.rated_seconds: float = 0.0
        self.began: float = time.perf_counter()
        self.validation_began: float = self.began
        self.stack: ExitStack = ExitStack()

    def open(self) -> None:
        """Keep the line at the terminal's bottom, below all other output, until :meth:`close`."""
        if self.screen:
            self.stack.enter_context(above(self.screen))

    def close(self) -> None:
        """Leave the line in place."""
        self.stack.close()

    def show(self, step: int, m: dict[str, Any]) -> None:
        """Record a step's measurements; write metrics and, if due, the progress line."""
        t, steps = self.trainer, self.trainer.options.steps
        if step > min(WARM_STEPS, steps - 1):
            self.rated_steps += 1
            self.rated_seconds += m["seconds"]
        if t.rank != 0:
            return
        now_rate = t.tokens_per_step / m["seconds"]
        t._write({
            "step": step, "loss": m["loss"], "tokens_per_second": now_rate,
            "grad_norm": m["grad_norm"] if math.isfinite(m["grad_norm"]) else None, "lr": m["lr"],
            "mfu": now_rate * t.flops_per_token / t.peak_flops,
            "peak_bytes": _core.memory_stats()["total_peak_bytes"],
            "comm_ms": m["comm_ms"], "data_ms": m["data_ms"],
            **({"loss_scale": t.scaler.get_scale()} if t.scaler else {}),
            **({"skipped": m["skipped"]} if m["skipped"] else {}),
            **(compression_report(t.model).metrics() if t.options.compress else {}),
        })  # fmt: skip
        speed, share, left = "-", "-", "-"
        pace = self.rated_steps / self.rated_seconds if self.rated_steps else 0.0
        if pace:
            rate = t.tokens_per_step * pace
            speed, share = f"{rate:,.0f}", f"{rate * t.flops_per_token / t.peak_flops:.0%}"
            left = _clock((steps - step) / pace)
        if not self._is_due(last=step == steps):
            return
        loss = f"loss {m['loss']:.4f}"
        if self.meter:
            self._show(self.meter(
                step, steps, time.perf_counter() - self.began, self._width(), rate=pace,
                bar_format=BAR, postfix=f"{loss}, {speed} tokens/s, MFU {share}",
            ))  # fmt: skip
            return
        self._show(f"step {step}/{steps}  {loss}  norm {m['grad_norm']:.3g}  "
                   f"{speed} tokens/s  ETA {left}  MFU {share}")  # fmt: skip

    def show_validation(self, batch: int, batches: int) -> None:
        """Show a validation's progress; the line is cleared after the last batch."""
        if batch == 1:
            self.validation_began = time.perf_counter()
        if self.screen and batch == batches:
            self.screen.show("")
        elif self._is_due():
            text = f"validation: batch {batch} of {batches}"
            if self.meter:
                elapsed = time.perf_counter() - self.validation_began
                text = self.meter(batch, batches, elapsed, self._width(), bar_format=BAR,
                                  prefix="validation: ")  # fmt: skip
            self._show(text)

    def end(self) -> None:
        """Leave the line on the screen, and print the average step time."""
        t = self.trainer
        if self.screen:
            self.screen.close()
        if t.rank == 0 and self.rated_steps:
            print(f"{self.rated_seconds / self.rated_steps * 1e3:.1f} ms a step on average, "
                  f"memory {_core.memory_stats()['total_peak_bytes'] / 2**20:,.0f} MiB, "
                  f"measured peak {t.peak_flops / 1e9:,.0f} GFLOP/s")  # fmt: skip

    def _is_due(self, last: bool = False) -> bool:
        """Return whether rank 0 shows a line now; the last line is always shown."""
        now = time.perf_counter()
        if self.trainer.rank != 0:
            return False
        if last or now - self.shown >= (LIVE_S if self.screen else PLAIN_S):
            self.shown = now
            return True
        return False

    def _width(self) -> int:
        return self.trainer.options.live or columns(sys.stdout) - 1

    def _show(self, text: str) -> None:
        if self.screen:
            self.screen.show(text[: self._width()])
        else:
            print(text[:LINE_WIDTH], flush=True)


def _find_meter() -> Callable[..., str] | None:
    """Return the tqdm function that draws a bar, or None if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"

    def meter(n: int, total: int, elapsed: float, width: int, **options: Any) -> str:
        plain = not encoding.lower().startswith("utf")
        return tqdm.format_meter(n, total, elapsed, ncols=width, ascii=plain, **options)

    return meter


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
