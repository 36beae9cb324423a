"""Averages of weights under Lightning's Trainer.

    from fsdpc.integrations.lightning import WeightAveraging

    trainer = pl.Trainer(callbacks=[WeightAveraging(decay=0.999)], ...)

Lightning's callback of this name copies the whole model, which sharded modules refuse.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks

from fsdpc.optim.ema import STATE, Decay
from fsdpc.torch import EMA

_KEY = "fsdpc_averages"


class _Averages(EMA):
    """An EMA with the method of torch's AveragedModel that Lightning's callback calls."""

    def update_parameters(self, model: Any) -> None:
        self.update()


class WeightAveraging(callbacks.WeightAveraging):
    """Lightning's WeightAveraging over sharded modules: :class:`fsdpc.torch.EMA` as a callback.

    Parameters
    ----------
    decay : float or callable, default 0.999
    every : int, default 1
        Both as in :class:`fsdpc.torch.EMA`; without ``should_update`` they count optimizer steps.

    Notes
    -----
    Updates come when ``should_update`` of Lightning's class says, after every step by default.
    Validation computes with the averages. After ``fit``, parameters are the averages. Checkpoints
    have the model's own parameters as usual, and full averages on top; they load at any number of
    ranks. Buffers are not averaged.

    Examples
    --------
    >>> from fsdpc.integrations.lightning import WeightAveraging  # doctest: +SKIP
    >>> trainer = pl.Trainer(callbacks=[WeightAveraging(0.99)])  # doctest: +SKIP
    """

    def __init__(self, decay: Decay = 0.999, every: int = 1) -> None:
        super().__init__(use_buffers=False)
        self._options: tuple[Decay, int] = decay, every
        self._fits = False
        self._swap: AbstractContextManager[None] | None = None

    def _ema(self, pl_module: pl.LightningModule) -> EMA:
        """Return the averages, which are made when the model has been sharded."""
        if self._average_model is None:
            decay, every = self._options
            self._average_model = _Averages(pl_module, decay, every=every)  # type: ignore[assignment]
        return self._average_model  # type: ignore[return-value]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Note whether the model is about to be fitted; it is not sharded yet."""
        self._fits = stage == "fit"
        if self._fits:
            self._average_model = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the averages, unless a checkpoint already has."""
        self._ema(pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Exchange parameters and averages back if a validation failed."""
        if self._swap is not None:
            self._swap_models(pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the averages; collective."""
        if self._average_model is not None:
            checkpoint[_KEY] = self._average_model.state_dict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the averages to go on with, if the checkpoint has any."""
        if self._fits and _KEY in checkpoint:
            self._ema(pl_module).load_state_dict(checkpoint[_KEY])

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        ema = self._ema(pl_module)
        if self._swap is not None:
            self._swap, ended = None, self._swap
            ended.__exit__(None, None, None)
        elif ema.num_updates > 0:  # there are none in Lightning's check before training
            self._swap = ema.swap()
            self._swap.__enter__()

    @torch.no_grad()
    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        optimizer = self._ema(pl_module).optimizer
        for group in optimizer.param_groups:
            for p in group["params"]:
                if optimizer._steps_of(p) > 0:
                    p.copy_(optimizer.state_tensors(p)[STATE])
