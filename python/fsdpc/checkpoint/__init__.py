"""Checkpoints: plain safetensors, with the same bytes for any number of ranks, saved atomically.

    from fsdpc import checkpoint

    state = {"model": model, "optimizer": optimizer, "scheduler": schedule, "data": loader}
    checkpoint.save("run/step-100", {**state, "extra": {"step": 100}})
    report = checkpoint.load("run/step-100", state)

A checkpoint is a folder of safetensors files, which transformers and other tools can read, and
``manifest.json``, which is written last and marks the checkpoint complete.
:class:`CheckpointManager` manages a folder of checkpoints. All calls except :func:`inspect` are
collective.
"""

from __future__ import annotations

from fsdpc.checkpoint.contents import CheckpointInfo, TensorInfo, inspect
from fsdpc.checkpoint.loading import LoadReport, load
from fsdpc.checkpoint.manager import CheckpointManager
from fsdpc.checkpoint.manifest import CheckpointError
from fsdpc.checkpoint.saving import SaveHandle, save
from fsdpc.checkpoint.trained import Trained

__all__ = [
    "CheckpointError", "CheckpointInfo", "CheckpointManager", "LoadReport", "SaveHandle",
    "TensorInfo", "Trained", "inspect", "load", "save",
]  # fmt: skip
