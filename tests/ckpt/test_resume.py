"""A run that is saved, ended and resumed is the run that went on, to the bit."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError
from fsdpc.data import DistributedSampler, Loader, SequenceDataset
from fsdpc.models import GPT2
from fsdpc.optim import get_optimizer_state_dict
from fsdpc.optim.lr_scheduler import WarmupCosine
from tests.faults.common import die, run

from .common import CONFIG, STRATEGIES, by_blocks, options_of, values

DROPOUT = CONFIG.with_(dropout=0.1, max_seq=16)
DTYPES = {"fp32": None, "bf16": fsdpc.bfloat16, "fp16": fsdpc.float16}


class Run:
    """A small training run with everything that has a state."""

    def __init__(self, how: str, dtype: str = "fp32", seed: int = 5, optimizer: str = "AdamW"):
        fsdpc.manual_seed(seed)
        self.model = GPT2(DROPOUT)
        if how != "plain":
            policy = fsdpc.MixedPrecisionPolicy(
                param_dtype=DTYPES[dtype], reduce_dtype=fsdpc.float32
            )
            by_blocks(self.model, mp_policy=policy, **options_of(how))
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        arguments = {"momentum": 0.9} if optimizer == "SGD" else {}
        make = getattr(fsdpc.optim, optimizer)
        self.optimizer = make(groups, lr=1e-2, **arguments)
        self.scheduler = WarmupCosine(self.optimizer, 3, 30)
        self.scaler = fsdpc.amp.LossScaler() if dtype == "fp16" else None
        words = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 16 * 60 + 1)
        data = SequenceDataset([words.astype(np.uint8)], seq_len=16)
        rank, world = (0, 1) if how == "plain" else (fsdpc.rank(), fsdpc.world_size())
        sampler = DistributedSampler(len(data), rank, world, seed=2, drop_last=True)
        self.loader = Loader(data, 2, sampler, prefetch=0)
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
                "scaler": self.scaler, "data": self.loader}  # fmt: skip

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            loss = self.model(*next(self.loader))
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            fsdpc.clip_grad_norm_(self.model, 1.0)
            self.scaler.step(self.optimizer) if self.scaler else self.optimizer.step()
            if self.scaler:
                self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss))
        return self

    def everything(self) -> Any:
        """All that a run is made of, as bytes and numbers; collective."""
        gathered = get_optimizer_state_dict(self.model, self.optimizer)
        states = {
            name: {k: v if k == "step" else v.numpy().tobytes() for k, v in entry.items()}
            for name, entry in gathered["state"].items()
        }
        others = [x and x.state_dict() for x in (self.scheduler, self.scaler, self.loader)]
        rng = fsdpc._core.rng_state()
        return values(self.model), states, gathered["param_groups"], others, rng


@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("how, dtype", [*((how, "fp32") for how in STRATEGIES), *(
    (how, "bf16") for how in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"))])  # fmt: skip
def test_10_and_10_are_20(how: str, dtype: str, tmp_path: Path) -> None:
    if how == "plain" and fsdpc.world_size() > 1:
        return
    whole = Run(how, dtype).train(20)
    first = Run(how, dtype).train(10)
    before = first.everything()
    checkpoint.save(tmp_path / "c", {**first.state, "extra": {"step": 10}})
    resumed = Run(how, dtype, seed=6)  # other values, which the load replaces
    report = checkpoint.load(tmp_path / "c", resumed.state)
    assert report.extra == {"step": 10}
    assert resumed.everything() == before
    resumed.train(10)
    assert resumed.losses == whole.losses[10:]
    assert resumed.everything() == whole.everything()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Lion"])
def test_every_optimizer_and_async(optimizer: str, tmp_path: Path) -> None:
    whole = Run("FULL_SHARD", optimizer=optimizer).train(8)
    first = Run("FULL_SHARD", optimizer=optimizer).train(4)
    checkpoint.save(tmp_path / "c", first.state, async_=True)
    first.train(2)  # meanwhile
    resumed = Run("FULL_SHARD", optimizer=optimizer, seed=6)
    checkpoint.load(tmp_path / "c", resumed.state)
    resumed.train(4)
    assert resumed.losses == whole.losses[4:]
    assert resumed.everything() == whole.everything()


@pytest.mark.ranks(2)
def test_with_a_loss_scaler(tmp_path: Path) -> None:
    whole = Run("FULL_SHARD", "fp16").train(20)
    first = Run("FULL_SHARD", "fp16").train(10)
    checkpoint.save(tmp_path / "c", first.state)
    resumed = Run("FULL_SHARD", "fp16", seed=6)
    checkpoint.load(tmp_path / "c", resumed.state)
    assert resumed.train(10).losses == whole.losses[10:]
    assert resumed.everything() == whole.everything()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.ranks(1, init=False)
def test_after_a_kill(ranks: int, tmp_path: Path) -> None:
    """10 steps, a save, SIGKILL; 10 more in new processes: scaler, cursor, dropout and all."""

    def train(rank: int, steps: int) -> Any:
        fsdpc.init()
        made = Run("FULL_SHARD", "fp16").train(steps)
        if steps == 20:
            return made.everything()
        with contextlib.suppress(fsdpc.PeerError):  # the other one may be gone first
            checkpoint.save(tmp_path / "c", made.state)
        die()

    def resume(rank: int) -> Any:
        fsdpc.init()
        made = Run("FULL_SHARD", "fp16", seed=6)
        checkpoint.load(tmp_path / "c", made.state)
        return made.train(10).everything()

    whole = run(lambda rank: train(rank, 20), ranks)
    assert run(lambda rank: train(rank, 10), ranks) == [None] * ranks
    assert run(resume, ranks) == whole


@pytest.mark.parametrize(
    "there", [(1, "plain"), (2, "FULL_SHARD"), (4, "HYBRID_SHARD")], ids=str
)
@pytest.mark.ranks(1, init=False)
def test_other_ranks_and_strategies(there: Any, tmp_path: Path) -> None:
    """What one world saved is the same to the bit in every other, and saves the same files."""
    ranks, how = there

    def without_cursor(everything: Any) -> Any:
        """A cursor between batches of one world may be inside one of another."""
        return *everything[:3], everything[3][:2], everything[4]

    def save(rank: int) -> Any:
        fsdpc.init()
        made = Run(how).train(3)
        checkpoint.save(tmp_path / "c", {**made.state, "data": None})
        return without_cursor(made.everything())

    before = run(save, ranks)[0]

    def load(rank: int, how: str) -> Any:
        fsdpc.init()
        other = Run(how, seed=6)
        state = {**other.state, "data": None}
        checkpoint.load(tmp_path / "c", state)
        checkpoint.save(tmp_path / f"{how}-{fsdpc.world_size()}", state)
        fsdpc.barrier()
        return without_cursor(other.everything())

    written = set()
    for n, how in [(1, "plain"), (1, "FULL_SHARD"), (2, "NO_SHARD"), (3, "SHARD_OPTIM"),
                   (4, "HYBRID_SHARD_ZERO2"), (4, "FULL_SHARD")]:  # fmt: skip
        for after in run(lambda rank, how=how: load(rank, how), n):
            assert after == before, (n, how)
        files = sorted((tmp_path / f"{how}-{n}").glob("*.safetensors"))
        written.add(tuple(path.read_bytes() for path in files))
    assert len(written) == 1 and len(next(iter(written))) == 2


@pytest.mark.ranks([1, 2])
def test_before_the_first_step(tmp_path: Path) -> None:
    first = Run("FULL_SHARD")
    before = first.everything()
    checkpoint.save(tmp_path / "c", first.state)
    files = sorted(os.listdir(tmp_path / "c"))
    assert files == ["config.json", "manifest.json", "model.safetensors"]
    fsdpc.barrier()
    resumed = Run("FULL_SHARD", seed=6).train(2)
    checkpoint.load(tmp_path / "c", resumed.state)
    assert resumed.everything() == before
    after = resumed.train(3).everything()
    fsdpc._core.set_rng_state(*before[-1])  # both draw from this process's numbers
    assert after == first.train(3).everything()


@pytest.mark.ranks([1, 2])
def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    made = Run("FULL_SHARD").train(1)
    checkpoint.save(tmp_path / "c", made.state)
    other = Run("FULL_SHARD", optimizer="Lion")
    with pytest.raises(CheckpointError, match="its optimizer is AdamW, this one Lion"):
        checkpoint.load(tmp_path / "c", other.state)
    checkpoint.save(tmp_path / "d", {"model": made.model})
    with pytest.raises(CheckpointError, match=r"it has no optimizer\n  it has no scheduler"):
        checkpoint.load(tmp_path / "d", made.state)
    few = fsdpc.optim.AdamW(list(made.model.parameters())[:3])
    with pytest.raises(CheckpointError, match="2 parameter groups, this one 1"):
        checkpoint.load(tmp_path / "c", {"model": made.model, "optimizer": few})


@pytest.mark.ranks([1, 2])
def test_what_a_checkpoint_may_lack(tmp_path: Path) -> None:
    state = {"model": fsdpc.nn.Linear(1, 1), "scaler": fsdpc.amp.LossScaler(3)}
    checkpoint.save(tmp_path / "none", {"model": state["model"]})
    with pytest.raises(CheckpointError, match="it has no scaler"):
        checkpoint.load(tmp_path / "none", state)
    checkpoint.load(tmp_path / "none", state, optional=("scaler",))
    assert state["scaler"].state_dict()["scale"] == 8.0
    with pytest.raises(ValueError, match="'model' is not one of optimizer, ema, scheduler"):
        checkpoint.load(tmp_path / "none", state, optional=("model",))
