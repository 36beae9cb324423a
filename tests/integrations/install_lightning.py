"""Lightning's strategy of FSDP2, of whichever ``fully_shard`` is in torch's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy

from .install_runs import Words, llama


class Lit(pl.LightningModule):
    """Shards a model by torch's name for it, on the mesh that the strategy has made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.model: Any = None
        self.seen: list[float] = []

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.model is None:
            self.model = llama(seed=self.seed)
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.seen.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)


def fit(folder: Path, sharded: bool, steps: int, seed: int, resume: Path | None = None) -> Any:
    """Train up to so many steps, of two batches each."""
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=sharded
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()],
        logger=False, enable_progress_bar=False, enable_model_summary=False, max_steps=steps,
        accumulate_grad_batches=2, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    module = Lit(seed)
    trainer.fit(module, torch.utils.data.DataLoader(Words(160), batch_size=2), ckpt_path=resume)
    return trainer, module
