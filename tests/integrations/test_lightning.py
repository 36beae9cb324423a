"""Lightning's Trainer and Fabric over units of fsdpc, through its own strategies of FSDP2.

tests/integrations/test_install.py saves, resumes and exchanges checkpoints with torch's FSDP2.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if "CI" not in os.environ:
    pytest.importorskip("lightning", reason="needs lightning, of the extra 'test'")

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric import strategies as fabric_strategies  # noqa: E402
from lightning.fabric.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import fsdpc  # noqa: E402
from fsdpc.integrations.lightning import WeightAveraging  # noqa: E402
from fsdpc.torch import FSDPModule, fully_shard, optim  # noqa: E402
from tests.torch.common import build, full, join_gloo  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SIZES = {"data_parallel_size": 2, "tensor_parallel_size": 1}


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    if not isinstance(net, FSDPModule):
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


class Lit(pl.LightningModule):
    def __init__(self, sharded: bool, ours: bool = False) -> None:
        super().__init__()
        self.sharded, self.ours = sharded, ours
        self.net = build()

    def configure_model(self) -> None:
        if self.sharded:
            shard(self.net, self.device_mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        kind = optim.AdamW if self.ours else torch.optim.AdamW
        optimizer = kind(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class ByHand(Lit):
    """Steps two optimizers itself, for two models of units."""

    def __init__(self, sharded: bool) -> None:
        super().__init__(sharded)
        self.automatic_optimization = False
        self.head = nn.Linear(5, 5)

    def configure_model(self) -> None:
        super().configure_model()
        if self.sharded and not isinstance(self.head, FSDPModule):
            fully_shard(self.head, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.net, self.head)]


@contextmanager
def joined(folder: Path) -> Iterator[None]:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    join_gloo(folder)
    yield
    dist.destroy_process_group()
    fsdpc.shutdown()


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 7, generator=generator), torch.randn(32, 5, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def fitted(
    folder: Path, module: Lit, ckpt_path: Any = None, **options: Any
) -> tuple[pl.Trainer, dict[str, Any]]:
    """The trainer and the unsharded parameters after two epochs."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=2, logger=False,
        strategy=ModelParallelStrategy(**SIZES) if module.sharded else DDPStrategy(),  # type: ignore[arg-type]
        plugins=[TorchElasticEnvironment()], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return trainer, {k: full(v).detach().clone().float() for k, v in module.state_dict().items()}


def assert_close(found: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **(tolerance or CLOSE), msg=name)


@pytest.mark.ranks(2, init=False, timeout=300)
def test_trainers_train_as_with_ddp(tmp_path: Path) -> None:
    """Accumulation, clipping, precisions, optimizers of either, and evaluation afterwards."""
    with joined(tmp_path):
        options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        _, plain = fitted(tmp_path, Lit(False), **options)
        for ours in (False, True):
            module = Lit(True, ours)
            trainer, found = fitted(tmp_path, module, **options)
            assert isinstance(module.net.blocks[0], FSDPModule)
            assert_close(found, plain)
            assert trainer.validate(module, batches(), verbose=False)[0]["val"] > 0
            assert len(trainer.predict(module, batches())) == 4
        for precision in ("bf16-mixed", "bf16-true"):
            options["precision"] = precision
            theirs, found = (fitted(tmp_path, Lit(s), **options)[1] for s in (False, True))
            assert_close(found, theirs, rtol=0.05, atol=0.01)
            assert not torch.equal(found["net.first.weight"], plain["net.first.weight"])
        theirs, found = (fitted(tmp_path, ByHand(sharded))[1] for sharded in (False, True))
        assert_close(found, theirs)


@pytest.mark.ranks(2, init=False, timeout=300)
def test_fabric_trains_saves_and_loads(tmp_path: Path) -> None:
    def run(strategy: Any, steps: int, state: Any = None, **options: Any) -> tuple[Any, Any, Any]:
        fabric = Fabric(
            accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()],
            **options,
        )  # fmt: skip
        fabric.launch()
        model = fabric.setup_module(build())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        if state is not None:
            found = {"model": model, "optimizer": optimizer, "step": 0}
            fabric.load(state, found)
            assert found["step"] == 2
        for k, (x, y) in enumerate(fabric.setup_dataloaders(batches())):
            if k // 2 == steps:
                break
            with fabric.no_backward_sync(model, enabled=k % 2 == 0):
                fabric.backward(nn.functional.mse_loss(model(x), y) / 2)
            if k % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
        return fabric, model, optimizer

    def ours(distributed: bool = True) -> Any:
        return fabric_strategies.ModelParallelStrategy(
            lambda m, mesh: shard(m, mesh["data_parallel"]),  # type: ignore[arg-type,return-value]
            save_distributed_checkpoint=distributed, **SIZES,  # type: ignore[arg-type]
        )  # fmt: skip

    def values(model: Any) -> dict[str, Any]:
        return {k: full(v).float() for k, v in model.state_dict().items()}

    with joined(tmp_path):
        expected = values(run(fabric_strategies.DDPStrategy(), 2)[1])
        for distributed in (False, True):
            fabric, model, optimizer = run(ours(distributed), 2)
            assert_close(values(model), expected)
            path = tmp_path / f"state{distributed}"
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
            _, again, states = run(ours(distributed), 0, path)
            assert_close(values(again), values(model), rtol=0, atol=0)
            old, new = (o.optimizer.state_dict()["state"] for o in (optimizer, states))
            for i, each in old.items():
                assert all(torch.equal(full(new[i][k]), full(v)) for k, v in each.items())
        half = run(ours(), 2, precision="bf16-mixed")[1]
        assert_close(values(half), expected, rtol=0.05, atol=0.02)


@pytest.mark.ranks(2, init=False, timeout=300)
def test_averages_of_weights(tmp_path: Path) -> None:
    """Losses of validation and parameters as Lightning's callback on a plain model; a resume."""

    class Fails(Lit):
        def validation_step(self, batch: Any, index: int) -> None:
            if self.trainer.global_step > 0:
                self.inside = self.net.last.weight.full_tensor()
                raise ZeroDivisionError

    def saves(name: str) -> Any:
        return ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)

    with joined(tmp_path):
        theirs = EMAWeightAveraging(use_buffers=False, decay=0.8)
        trainer, plain = fitted(tmp_path, Lit(False), callbacks=[theirs])
        options = {"enable_checkpointing": True, "callbacks": [WeightAveraging(0.8), saves("a")]}
        ours, found = fitted(tmp_path, Lit(True), **options)
        assert_close(found, plain)
        want, got = trainer.callback_metrics["val"], ours.callback_metrics["val"]
        torch.testing.assert_close(got, want, **CLOSE)
        options["callbacks"] = [WeightAveraging(0.8), saves("b")]
        again = fitted(tmp_path, Lit(True), ckpt_path=tmp_path / "a" / "epoch=0.ckpt", **options)[1]
        assert_close(again, found, rtol=0, atol=0)
        module, callback = Fails(True), WeightAveraging(0.8)
        with pytest.raises(ZeroDivisionError):
            fitted(tmp_path, module, callbacks=[callback])
        averages = callback._average_model.state_dict()["averages"]  # type: ignore[union-attr]
        assert torch.equal(averages["net.last.weight"], module.inside)


def test_the_page_runs_as_it_is(tmp_path: Path) -> None:
    """Started by Lightning itself, on two ranks."""
    script = tmp_path / "train.py"
    script.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.findall(r"loss (\d+\.\d+)", done.stdout))
    assert last < first
    assert (tmp_path / "checkpoints" / "last.ckpt" / "meta.pt").is_file()
