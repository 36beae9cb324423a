"""Lightning's Trainer and Fabric over fsdpc, beside their own DDP strategies."""

from __future__ import annotations

import logging
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

if "CI" not in os.environ:
    pytest.importorskip("lightning", reason="needs lightning, of the extra 'test'")

import lightning  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import fsdpc  # noqa: E402
from fsdpc.integrations import _units  # noqa: E402
from fsdpc.integrations.lightning import FsdpcFabricStrategy, FsdpcStrategy  # noqa: E402
from fsdpc.torch import FSDPModule, fully_shard, optim  # noqa: E402
from tests.torch.common import Net, build, full, join_gloo  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Lit(pl.LightningModule):
    """A network, and a parameter of the module's own that its step reads."""

    def __init__(self, ours: bool = False, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = build()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        kind = optim.AdamW if self.hparams["ours"] else torch.optim.AdamW
        optimizer = kind(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class ShardsItself(Lit):
    """Chooses units in ``configure_model``, and leaves a parameter out."""

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            for block in self.net.blocks:
                fully_shard(block)
            fully_shard(self.net)


class ByHand(Lit):
    """Steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.automatic_optimization = False
        self.head = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.net, self.head)]


class Reads(Callback):
    """Keeps what state dicts have at the end of an epoch, and in a checkpoint."""

    shapes: Any = None
    saved: Any = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.shapes = {k: tuple(v.shape) for k, v in pl_module.state_dict().items()}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        self.saved = sorted(checkpoint["state_dict"])


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 7, generator=generator), torch.randn(32, 5, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer_of(folder: Path, strategy: Any, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, **options}
    if strategy == "ddp":
        strategy = pl.strategies.DDPStrategy(cluster_environment=TorchElasticEnvironment())
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        logger=False,
        enable_checkpointing="callbacks" in options,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def fitted(folder: Path, strategy: Any, model: Any = None, **options: Any) -> dict[str, Any]:
    """Full parameters after a fit."""
    resume = options.pop("ckpt_path", None)
    model = model or Lit()
    trainer = trainer_of(folder, strategy, **options)
    trainer.fit(model, batches(), batches(), ckpt_path=resume)
    return {k: v.detach().clone().float() for k, v in model.state_dict().items()}


def quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def assert_close(found: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        own, theirs = full(found[name]), full(value)
        torch.testing.assert_close(own, theirs, **(tolerance or CLOSE), msg=name)


@pytest.mark.ranks(2, init=False, timeout=300)
def test_trainers_train_as_with_ddp(tmp_path: Path) -> None:
    """Accumulation, clipping, precisions, units by class and by the user, both optimizers."""
    quiet()
    join_gloo(tmp_path)
    plain = fitted(tmp_path, "ddp")
    reads = Reads()
    model = Lit()
    trainer = trainer_of(tmp_path, "fsdpc", callbacks=[
        reads, EarlyStopping("val"), ModelCheckpoint(tmp_path / "full", save_last=True),
    ])  # fmt: skip
    trainer.fit(model, batches(), batches())
    assert isinstance(model, FSDPModule) and isinstance(model.net.blocks[0], FSDPModule)
    assert_close(dict(model.state_dict()), plain)
    assert reads.shapes == {k: tuple(v.shape) for k, v in plain.items()}
    assert reads.saved == (sorted(plain) if fsdpc.rank() == 0 else [])
    seen = trainer.validate(model, batches(), verbose=False)[0]["val"]
    assert trainer.test(model, batches(), verbose=False)[0]["val"] == seen
    assert len(trainer.predict(model, batches())) == 4
    assert_close(dict(model.state_dict()), plain)

    by_class = FsdpcStrategy(["Block", nn.Linear], strategy="SHARD_GRAD_OP")
    assert_close(fitted(tmp_path, by_class, Lit(ours=True)), plain)
    assert_close(fitted(tmp_path, FsdpcStrategy(), ShardsItself()), plain)
    once = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    by_hand = fitted(tmp_path, FsdpcStrategy(), ByHand(), **once)
    assert_close(by_hand, fitted(tmp_path, "ddp", ByHand(), **once))
    for precision in ("bf16-mixed", "bf16-true"):
        own = fitted(tmp_path, FsdpcStrategy(), precision=precision)
        theirs = fitted(tmp_path, "ddp", precision=precision)
        assert_close(own, theirs, rtol=0.05, atol=0.01)
        assert not torch.equal(full(own["net.first.weight"]), plain["net.first.weight"])
    model = Lit()
    fitted(tmp_path, FsdpcStrategy({"net.blocks.*": {}}), model, precision="bf16-mixed")
    assert model.net.blocks[0]._fsdpc_state.policy.param_dtype is torch.bfloat16
    assert model._fsdpc_state.policy.param_dtype is None
    halves = {"plugins": MixedPrecision("16-mixed", "cpu")}
    assert_close(fitted(tmp_path, FsdpcStrategy(), **halves), plain, rtol=0.01, atol=0.002)
    with pytest.raises(NotImplementedError, match="StochasticWeightAveraging keeps a copy"):
        fitted(tmp_path, FsdpcStrategy(), callbacks=[StochasticWeightAveraging(1e-2)])
    with pytest.raises(ValueError, match="no module of Lit is a 'Layer'"):
        fitted(tmp_path, FsdpcStrategy("Layer"))
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
def test_checkpoints_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file under DDP and here, a folder here and on one rank alone."""
    quiet()
    join_gloo(tmp_path)
    expected = fitted(tmp_path, "ddp")
    path = {}
    for kind in ("full", "sharded"):
        saver = ModelCheckpoint(tmp_path / kind, filename="first", every_n_epochs=1, save_top_k=-1)
        strategy = FsdpcStrategy(state_dict_type=kind)
        fitted(tmp_path, strategy, Lit(ours=kind == "full"), max_epochs=1, callbacks=[saver])
        path[kind] = tmp_path / kind / "first.ckpt"
        resumed = fitted(tmp_path, FsdpcStrategy(), ckpt_path=path[kind])
        assert_close(resumed, expected)
        seen = trainer_of(tmp_path, FsdpcStrategy()).validate(
            Lit(), batches(), ckpt_path=path[kind], verbose=False
        )
        assert seen[0]["val"] > 0
    assert path["full"].is_file() and path["sharded"].is_dir()
    assert_close(fitted(tmp_path, "ddp", ckpt_path=path["full"]), expected)
    whole = torch.load(path["full"], weights_only=True)
    Net().load_state_dict(
        {k[4:]: v for k, v in whole["state_dict"].items() if k.startswith("net.")}
    )
    again = Lit.load_from_checkpoint(path["full"], map_location="cpu")
    assert again.hparams["rate"] == 1e-2
    if fsdpc.rank() == 0:
        (path["sharded"] / "meta.pt").rename(tmp_path / "meta.pt")
    dist.barrier()
    with pytest.raises(ValueError, match="its save did not end"):
        fitted(tmp_path, FsdpcStrategy(), ckpt_path=path["sharded"])
    dist.barrier()
    if fsdpc.rank() == 0:
        (tmp_path / "meta.pt").rename(path["sharded"] / "meta.pt")
    last = fsdpc.rank() == 1
    dist.destroy_process_group()
    fsdpc.shutdown()
    if last:
        return
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    model = Lit()
    trainer = trainer_of(tmp_path, FsdpcStrategy(), max_epochs=1)
    trainer.fit(model, batches(), ckpt_path=path["sharded"])  # has made that epoch
    assert trainer.global_step == 2
    assert_close(dict(model.state_dict()), whole["state_dict"], rtol=1e-4, atol=1e-5)
    state = trainer.optimizers[0].state_dict()["state"]
    for i, values in whole["optimizer_states"][0]["state"].items():
        assert_close(state[i], values, rtol=1e-4, atol=1e-5)
    arguments = ["", str(path["sharded"]), "--output_file", f"{tmp_path}/one.ckpt"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    again = Lit()
    trainer_of(tmp_path, FsdpcStrategy(), max_epochs=1).fit(
        again, batches(), ckpt_path=tmp_path / "one.ckpt"
    )
    assert_close(dict(again.state_dict()), dict(model.state_dict()))
    dist.destroy_process_group()
    fsdpc.shutdown()


@pytest.mark.ranks(2, init=False, timeout=300)
def test_fabric_trains_saves_and_loads(tmp_path: Path) -> None:
    quiet()
    join_gloo(tmp_path)

    def run(strategy: Any, steps: int, state: Any = None, **options: Any) -> tuple[Any, Any, Any]:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
        fabric.launch()
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # before it is sharded
        model, optimizer = fabric.setup(model, optimizer)
        if state is not None:
            found = {"model": model, "optimizer": optimizer, "step": 0}
            assert fabric.load(state, found) == {}
            assert found["step"] == 2
        for k, (x, y) in enumerate(fabric.setup_dataloaders(batches())):
            if k // 2 == steps:
                break
            if state is not None and k < 4:
                continue
            with fabric.no_backward_sync(model, enabled=k % 2 == 0):
                fabric.backward(nn.functional.mse_loss(model(x), y) / 2)
            if k % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
        return fabric, model, optimizer

    ddp = lightning.fabric.strategies.DDPStrategy(cluster_environment=TorchElasticEnvironment())
    expected = dict(run(ddp, 2)[1].state_dict())
    for kind in ("full", "sharded"):
        fabric, model, optimizer = run(FsdpcFabricStrategy(state_dict_type=kind), 1)
        fabric, model, optimizer = run(FsdpcFabricStrategy(state_dict_type=kind), 2)
        assert_close(dict(model.state_dict()), expected)
        path = tmp_path / kind
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
        _, again, states = run("fsdpc", 2, path)
        assert_close(dict(again.state_dict()), dict(model.state_dict()))
        for i, values in optimizer.optimizer.state_dict()["state"].items():
            assert_close(states.optimizer.state_dict()["state"][i], values)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FsdpcFabricStrategy())
    fabric.launch()
    model = fabric.setup_module(build())
    optimizer = fabric.setup_optimizers(optim.AdamW(model.parameters(), lr=1e-2))
    fabric.backward(model(torch.ones(2, 7)).sum())
    optimizer.step()
    assert optimizer.optimizer.state[model.first.weight]["step"] == 1
    half = run(FsdpcFabricStrategy(), 2, precision="bf16-mixed")[1]
    assert_close(dict(half.state_dict()), expected, rtol=0.05, atol=0.02)
    dist.destroy_process_group()
    fsdpc.shutdown()


def test_plans_of_models_are_followed() -> None:
    class Planned(Net):
        fsdp_plan = {"blocks.0": "keep_full_weight"}

    model = Lit()
    model.net = Planned()
    assert _units.plan_of(None, model) == {"net.blocks.0": "keep_full_weight"}


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
