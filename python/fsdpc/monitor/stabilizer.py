"""Skip harmful steps on all ranks together, and return to a checkpoint if they persist.

A rank whose loss jumps must tell the other ranks; here that costs no extra communication. That
rank's loss becomes infinite on the device before backward, and the host does not read it. As a
result, its gradients, every reduction that includes them, and the norm measured by clipping are
infinite or NaN on all ranks, over shards and replicas. Only then do the ranks find out whose loss
jumped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from fsdpc import distributed
from fsdpc._core import MismatchError, PeerError
from fsdpc.display.text import say
from fsdpc.nn.module import Module
from fsdpc.sharding import clip


@dataclass(frozen=True, kw_only=True)
class StabilizerOptions:
    """Options that control when :class:`TrainingStabilizer` skips a step, and when it gives up.

    Parameters
    ----------
    loss_factor : float, default 5
        A loss above this many times the mean of the window is a jump.
    window : int, default 100
        Number of losses in the mean: this rank's losses, from steps that were taken.
    least : int, default 10
        Number of steps before losses and norms are checked, because they are large in a new model.
    norm_limit : float, default 10
        Maximum gradient norm, before clipping, at which a step is taken.
    patience : int, default 3
        Number of consecutive skipped steps after which :attr:`Stabilized.go_back` is set.

    Examples
    --------
    >>> import fsdpc
    >>> fsdpc.StabilizerOptions(norm_limit=100.0).norm_limit
    100.0
    """

    loss_factor: float = 5.0
    window: int = 100
    least: int = 10
    norm_limit: float = 10.0
    patience: int = 3

    def __post_init__(self) -> None:
        for name in ("loss_factor", "norm_limit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("window", "least", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.least > self.window:
            raise ValueError(f"least {self.least} is more than the window of {self.window}")


@dataclass(frozen=True, kw_only=True)
class Stabilized:
    """The outcome of a step, the same on all ranks.

    ``reason`` is empty if the step was taken, otherwise "loss", "norm" or "nonfinite"; ``text``
    explains it. For "nonfinite", ``names`` are the parameters whose gradients contain NaN or
    infinity. ``norm`` is the norm before clipping. ``go_back`` is set after ``patience``
    consecutive skipped steps (see the options).

    Examples
    --------
    >>> from fsdpc import Stabilized
    >>> Stabilized(taken=True, norm=0.5).go_back
    False
    """

    taken: bool
    norm: float
    reason: str = ""
    text: str = ""
    names: tuple[str, ...] = ()
    go_back: bool = False


class TrainingStabilizer:
    """Skips steps in which the loss jumps, or the gradients are too large or not finite.

    Parameters
    ----------
    model : Module or torch.nn.Module
        A model, sharded or not.
    optimizer : optimizer
        From either frontend, or from ``torch.optim``.
    max_norm : float, default 1
        Norm to which gradients are clipped.
    options : StabilizerOptions, optional
    log : callable, optional
        Called on rank 0 with a line for each skipped step; by default lines go to stderr.

    Attributes
    ----------
    skipped : dict of str to int
        Number of skipped steps by reason.
    in_a_row : int
        Number of skipped steps since the last step that was taken.
    went_back : int
        Number of calls of :meth:`go_back`.

    Notes
    -----
    A step that is taken costs the small all-reduce in :func:`fsdpc.clip_grad_norm_` and one wait
    for its result, when the loss is also read. A skipped step costs at most two more all-reduces,
    to find the reason. The window contains this rank's own losses, so a jump on any rank skips the
    step on all ranks.

    Use the stabilizer with bfloat16: in float16, an infinite loss would make the loss scaler shrink
    the scale.

    Examples
    --------
    ::

        stabilizer = fsdpc.TrainingStabilizer(model, optimizer)
        for x, y in batches:
            stabilizer.watch(model(x, y)).backward()
            if stabilizer.step().go_back:
                step = stabilizer.go_back(manager, state)
            optimizer.zero_grad()

    Examples
    --------
    >>> import fsdpc
    >>> layer = fsdpc.fully_shard(fsdpc.nn.Linear(2, 1))
    >>> stabilizer = fsdpc.TrainingStabilizer(layer, fsdpc.optim.AdamW(layer.parameters(), lr=0.1))
    >>> stabilizer.watch(layer(fsdpc.ones(1, 2)).sum()).backward()
    >>> stabilizer.step().taken
    True
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        max_norm: float = 1.0,
        options: StabilizerOptions | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.max_norm: float = max_norm
        self.options: StabilizerOptions = options or StabilizerOptions()
        self.skipped: dict[str, int] = {"loss": 0, "norm": 0, "nonfinite": 0}
        self.in_a_row: int = 0
        self.went_back: int = 0
        self._log = log or say
        self._window: deque[float] = deque(maxlen=self.options.window)
        self._losses: list[Any] = []  # this step's losses, not read yet
        native = isinstance(model, Module)
        self._clip = (clip if native else import_module("fsdpc.torch")).clip_grad_norm_

    @property
    def gave_up(self) -> bool:
        """Whether the last step was skipped and used up :attr:`StabilizerOptions.patience`."""
        return self.in_a_row > 0 and self.in_a_row % self.options.patience == 0

    @property
    def limit(self) -> float:
        """The largest loss that does not count as a jump."""
        if len(self._window) < self.options.least:
            return math.inf
        return self.options.loss_factor * sum(self._window) / len(self._window)

    def watch(self, loss: Any) -> Any:
        """Return the loss to call ``backward`` on, without reading it; call it in each micro-step.

        The result is the loss itself, or infinity if the loss exceeds :attr:`limit`.
        """
        kept = loss.detach()
        self._losses.append(kept)
        return loss / (kept <= self.limit).to(loss.dtype)

    def step(self) -> Stabilized:
        """Clip the gradients and step the optimizer, or skip the step (collective).

        Returns
        -------
        Stabilized

        Raises
        ------
        RuntimeError
            :meth:`watch` was not called with a loss.
        """
        if not self._losses:
            raise RuntimeError("step() without a loss: call backward() on what watch(loss) returns")
        error: Exception | None = None
        try:
            norm = float(self._clip(self.model, self.max_norm, error_if_nonfinite=True))
        except (PeerError, MismatchError):
            raise
        except (FloatingPointError, RuntimeError) as caught:  # torch's norm raises the latter
            norm, error = math.nan, caught
        losses = [float(loss) for loss in self._losses]
        limit = self.limit
        self._losses.clear()
        is_new = len(self._window) < self.options.least
        if error is None and (is_new or norm <= self.options.norm_limit):
            self._window.append(sum(losses) / len(losses))
            self.in_a_row = 0
            self.optimizer.step()
            return Stabilized(taken=True, norm=norm)
        if error is None:
            found = {"reason": "norm", "text": f"gradient norm {norm:.4g} is above "
                     f"{self.options.norm_limit:g}"}  # fmt: skip
        else:
            found = self._diagnose(max(losses, key=_badness), limit, error)
        return self._skip(norm, **found)

    def _diagnose(self, loss: float, limit: float, error: Exception) -> dict[str, Any]:
        """Collect the losses of all ranks and, if none jumped, check the gradients."""
        rows = distributed.all_gather(np.array([loss, limit], np.float64))
        bad = [
            f"{value:.4g} on rank {rank} (above {most:.4g})"
            for rank, (value, most) in enumerate(rows.tolist())
            if most < value < math.inf
        ]
        if bad:
            return {"reason": "loss", "text": "loss " + ", ".join(bad)}
        names = _nonfinite(self.model)
        losses = [f"{x} on rank {rank}" for rank, x in enumerate(rows[:, 0]) if not np.isfinite(x)]
        if not names and not losses:
            raise error  # not about non-finite values
        shown = ", ".join(f"'{name}'" for name in names[: clip.NAMED])
        shown += f" and {len(names) - clip.NAMED} more" if names[clip.NAMED :] else ""
        text = f"gradients hold NaN or infinity, in {shown}" if names else ""
        text += f"{'; ' * bool(text and losses)}loss {', '.join(losses)}" if losses else ""
        return {"reason": "nonfinite", "text": text, "names": names}

    def _skip(self, norm: float, reason: str, text: str, names: Any = ()) -> Stabilized:
        self.optimizer.zero_grad()
        self.skipped[reason] += 1
        self.in_a_row += 1
        many = self.in_a_row
        if not distributed.is_initialized() or distributed.rank() == 0:
            total = sum(self.skipped.values())
            self._log(f"step skipped ({many} in a row, {total} in all): {text}")
        return Stabilized(taken=False, norm=norm, reason=reason, text=text, names=tuple(names),
                          go_back=self.gave_up)  # fmt: skip

    def go_back(self, manager: Any, state: Mapping[str, Any], **options: Any) -> int:
        """Load the newest checkpoint, and continue from it in a different data order (collective).

        Parameters
        ----------
        manager : fsdpc.checkpoint.CheckpointManager
        state : mapping
            As for the manager's ``restore``. A :class:`fsdpc.data.Loader` under ``"data"`` is
            reordered by :meth:`~fsdpc.data.Loader.reorder`; seed any other loader from
            ``went_back``.
        **options
            Options of ``restore``.

        Returns
        -------
        int
            The checkpoint's step.

        Raises
        ------
        FloatingPointError
            There is no checkpoint.
        """
        step: int | None = manager.restore(state, **options)
        if step is None:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row were skipped, and {manager.folder} has no "
                "checkpoint to go back to; take a lower learning rate, or save earlier"
            )
        self.went_back += 1
        self.in_a_row = 0
        loader = state.get("data")
        if hasattr(loader, "reorder"):
            loader.reorder(self.went_back)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the counts to save in a checkpoint's ``"extra"``; the window is not saved."""
        return {"skipped": dict(self.skipped), "went_back": self.went_back}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts that :meth:`state_dict` returned."""
        self.skipped.update(state["skipped"])
        self.went_back = int(state["went_back"])


def _badness(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _nonfinite(model: Any) -> list[str]:
    """Name the parameters whose gradients contain NaN or infinity on any rank (collective)."""
    if isinstance(model, Module):
        norms = clip.grad_norms(model, math.inf)
        return [name for name, norm in norms.items() if not math.isfinite(norm)]
    named = list(model.named_parameters())
    bad = [p.grad is not None and not math.isfinite(p.grad.norm(math.inf)) for _, p in named]
    bad = distributed.all_reduce(np.array(bad, np.int32), "max").tolist()
    return [name for (name, _), found in zip(named, bad, strict=True) if found]
