"""Checkpoints of torch models with frozen quantised weights: their codes, scales and schemes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError
from fsdpc.checkpoint.convert import convert
from fsdpc.torch import fully_shard
from tests.faults.common import run

bnb = pytest.importorskip("bitsandbytes")
quantization = pytest.importorskip("torchao.quantization")

four = partial(bnb.nn.Linear4bit, compute_dtype=torch.float32)
BASES: dict[str, Any] = {
    "nf4": partial(four, quant_type="nf4"),
    "nf4, whole scales": partial(four, quant_type="nf4", compress_statistics=False),
    "nf4 in bfloat16": partial(four, quant_type="nf4", quant_storage=torch.bfloat16),
    "fp4": partial(four, quant_type="fp4"),
    "int8": partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
    "torchao int8": nn.Linear, "torchao float8": nn.Linear, "plain": nn.Linear,
}  # fmt: skip
AO = {"torchao int8": "Int8WeightOnlyConfig", "torchao float8": "Float8WeightOnlyConfig"}


class Adapted(nn.Module):
    """A frozen quantised layer and a trained one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = BASES[kind](64, 64).requires_grad_(False)
        self.adapter = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def build(kind: str, seed: int, shard: bool = True) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model: Any = nn.Sequential(Adapted(kind), Adapted(kind)).to("cpu")
    if kind in AO:
        config = getattr(quantization, AO[kind])()
        quantization.quantize_(model, config, lambda m, name: name.endswith("base"))
    for layer in model:
        layer.base.support_avx512bf16_for_cpu = False
        if shard:
            fully_shard(layer)
    return fully_shard(model) if shard else model


def step(model: Any, optimizer: Any) -> torch.Tensor:
    y = model(torch.linspace(-1, 1, 128).view(2, 64))
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def state_of(model: Any, trained: bool = False) -> dict[str, Any]:
    adapters = [p for p in model.parameters() if p.requires_grad]
    held = checkpoint.Trained(model) if trained else model
    return {"model": held, "optimizer": torch.optim.AdamW(adapters, lr=1e-2)}


def tensors_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def saved(rank: int, kind: str, folder: Path, shard: bool = True, trained: bool = False) -> Any:
    """Two steps, a checkpoint, and the outputs of two more."""
    fsdpc.init()
    state = state_of(model := build(kind, 1, shard), trained)
    step(model, state["optimizer"]), step(model, state["optimizer"])
    checkpoint.save(folder, state)
    return [step(model, state["optimizer"]).tolist() for _ in range(2)]


def resumed(
    rank: int, kind: str, folder: Path, shard: bool = True, seed: int = 2, trained: bool = False
) -> Any:
    """The same from the checkpoint, in a model of other values that has been used."""
    fsdpc.init()
    state = state_of(model := build(kind, seed, shard), trained)
    model(torch.ones(2, 64))
    checkpoint.load(folder, state)
    return [step(model, state["optimizer"]).tolist() for _ in range(2)]


def base_of(folder: Path) -> set[Any]:
    tensors = checkpoint.inspect(folder).tensors
    return {(t.name, t.dtype, t.crc32c) for t in tensors if ".base.weight" in t.name}


SAVED = [kind for kind in BASES if kind != "plain"]


@pytest.mark.ranks(1, init=False, timeout=120)
@pytest.mark.parametrize("kind", SAVED)
def test_files_are_equal_and_load_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """Sharded or not; all ranks have the same data."""
    outputs = [
        run(partial(saved, kind=kind, folder=tmp_path / name, shard=shard), ranks)[0]
        for name, ranks, shard in (("two", 2, True), ("one", 1, True), ("plain", 1, False))
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    assert tensors_of(tmp_path / "two") == tensors_of(tmp_path / "one")
    assert tensors_of(tmp_path / "two") == tensors_of(tmp_path / "plain")
    for ranks, shard in ((2, True), (1, True), (1, False)):
        again = partial(resumed, kind=kind, folder=tmp_path / "two", shard=shard)
        assert run(again, ranks)[0] == outputs[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", BASES)
def test_other_schemes_are_refused(kind: str, tmp_path: Path) -> None:
    schemes = "((nf4|fp4|int8|Int8Tensor|Float8Tensor) of .*columns|not quantised)"
    model = build(kind, 1)
    checkpoint.save(tmp_path / "c", {"model": model})
    checkpoint.save(tmp_path / "low", {"model": model}, dtype="bfloat16")
    if kind != "plain":  # codes and scales are not rounded
        assert base_of(tmp_path / "low") == base_of(tmp_path / "c")
    for other in BASES:
        if other != kind:
            model = build(other, 1)
            with pytest.raises(CheckpointError, match=f"'0.base.weight' +{schemes} +{schemes}"):
                checkpoint.load(tmp_path / "c", {"model": model}, strict=False)


@pytest.mark.ranks(1)
def test_schemes_follow_merges(tmp_path: Path) -> None:
    """A merge may change the dtype of what codes stand for."""
    model = build("nf4", 1)
    model[0].base.weight.quant_state.dtype = torch.bfloat16
    checkpoint.save(tmp_path / "c", {"model": model})
    with pytest.raises(CheckpointError, match=r"'0.base.weight' .* for torch.bfloat16.* for .*32"):
        checkpoint.load(tmp_path / "c", {"model": build("nf4", 1)})


@pytest.mark.ranks(1, init=False, timeout=120)
@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_adapters_alone(kind: str, tmp_path: Path) -> None:
    """With a checksum of the base, codes and scales, which is the same for any number of ranks."""
    run(partial(saved, kind=kind, folder=tmp_path / "whole"), 2)
    before = run(partial(saved, kind=kind, folder=tmp_path / "c", trained=True), 2)[0]
    names = {t.name for t in checkpoint.inspect(tmp_path / "c").tensors if t.kind == "model"}
    assert names == {f"{i}.adapter.{key}" for i in (0, 1) for key in ("weight", "bias")}
    for ranks, shard in ((1, True), (1, False)):
        again = partial(resumed, kind=kind, folder=tmp_path / "c", shard=shard, trained=True)
        assert run(partial(again, seed=1), ranks)[0] == before
        with pytest.raises(AssertionError, match="was saved over another base"):
            run(again, ranks)


@pytest.mark.ranks(1)
def test_conversions_keep_the_scheme_or_are_refused(tmp_path: Path) -> None:
    model = build("nf4", 1, shard=False)
    checkpoint.save(tmp_path / "saved", {"model": model})
    convert(tmp_path / "saved", tmp_path / "again")
    other = build("nf4", 2, shard=False)
    checkpoint.load(tmp_path / "again", {"model": other})
    assert torch.equal(other[0].base.weight, model[0].base.weight)
    for layout in "dcp", "torch":
        with pytest.raises(CheckpointError, match=r"'0.base.weight' .* has no place for their"):
            convert(tmp_path / "saved", tmp_path / layout, layout)
        assert not (tmp_path / layout).exists()
