"""Quantised base models: the same bits on any number of ranks, and checkpoints of adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import checkpoint, lora, models, nn, optim
from fsdpc.models import Llama, ModelConfig

CONFIG = ModelConfig(vocab_size=96, dim=128, layers=2, heads=2, inner=192, max_seq=32)


def save_base(folder: Path, seed: int = 7) -> None:
    fsdpc.manual_seed(seed)
    models.save_pretrained(Llama(CONFIG), folder)


def adapted(folder: Path, scheme: str = "nf4", shard: bool = True) -> Any:
    """A model whose quantised layers have adapters; sharded before it is loaded, or whole."""
    fsdpc.manual_seed(8)
    if not shard:
        model = models.from_pretrained(folder, quantize=scheme)
        lora.apply(model, 4)
        return model
    with fsdpc.deferred_init():
        model = models.from_config(folder)
    nn.quantize_(model, scheme)
    lora.apply(model, 4)
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    models.load_pretrained(model, folder)
    return model


def train(model: Any, steps: int) -> list[float]:
    optimizer = optim.AdamW(lora.parameters(model), lr=1e-2)
    ids, losses = fsdpc.tensor(np.random.default_rng(1).integers(0, 96, (2, 16))), []
    for _ in range(steps):
        loss = model(ids, targets=ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def adapters(model: Any) -> dict[str, np.ndarray]:
    return {
        name: fsdpc.full_tensor(p).numpy()
        for name, p in sorted(model.named_parameters())
        if "lora" in name
    }


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("scheme", ["nf4", "int4", "int8"])
def test_codes_are_those_of_an_unsharded_model(scheme: str, tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    before = fsdpc.memory_stats()
    sharded = adapted(tmp_path / "base", scheme)
    train(sharded, 1)
    plan, after = fsdpc.memory_plan(sharded), fsdpc.memory_stats()
    assert after["master_bytes"] - before["master_bytes"] == plan.master
    held = float(after["unsharded_bytes"] - before["unsharded_bytes"])
    assert fsdpc.all_reduce(held, "max") == plan.unsharded
    sharded, whole = adapted(tmp_path / "base", scheme), adapted(tmp_path / "base", scheme, False)
    found = dict(sharded.named_parameters())
    for name, p in whole.named_parameters():
        assert np.array_equal(fsdpc.full_tensor(found[name]).bits(), p.detach().bits()), name
    coded = {name for name, p in found.items() if p.dtype.name == "uint8"}
    assert len(coded) == 14 and "lm_head.weight" not in coded
    ids = fsdpc.tensor(np.arange(16).reshape(1, 16))
    assert np.array_equal(sharded(ids).numpy(), whole(ids).numpy())


@pytest.mark.ranks([1, 2, 4])
def test_fifty_steps_have_the_bits_of_an_unsharded_model(tmp_path: Path) -> None:
    """All ranks have the same data, and a mean over equal gradients is exact."""
    save_base(tmp_path / "base")
    model, whole = adapted(tmp_path / "base"), adapted(tmp_path / "base", shard=False)
    losses = train(model, 50)
    assert losses == train(whole, 50)
    assert losses[-1] < losses[0] - 0.2
    for name, value in adapters(whole).items():
        assert np.array_equal(adapters(model)[name], value), name


@pytest.mark.ranks(2)
def test_checkpoints_hold_adapters_and_name_their_base(tmp_path: Path) -> None:
    save_base(tmp_path / "base"), save_base(tmp_path / "other", 9)
    model = adapted(tmp_path / "base")
    optimizer = optim.AdamW(lora.parameters(model), lr=1e-2)
    train(model, 2)
    state = {"model": checkpoint.Trained(model), "optimizer": optimizer}
    checkpoint.save(tmp_path / "step", state)
    names = [t.name for t in checkpoint.inspect(tmp_path / "step").tensors]
    assert names and all(".lora_" in name for name in names)
    again = adapted(tmp_path / "base")
    checkpoint.load(tmp_path / "step", {"model": checkpoint.Trained(again)})
    for name, value in adapters(model).items():
        assert np.array_equal(adapters(again)[name], value)
    for folder, scheme in (("other", "nf4"), ("base", "int8")):
        stranger = adapted(tmp_path / folder, scheme)
        before = adapters(stranger)
        with pytest.raises(checkpoint.CheckpointError, match="was saved over another base: the"):
            checkpoint.load(tmp_path / "step", {"model": checkpoint.Trained(stranger)})
        assert all(np.array_equal(adapters(stranger)[name], v) for name, v in before.items())


@pytest.mark.ranks(1)
def test_a_base_without_values_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad = False
    checkpoint.save(tmp_path / "step", {"model": checkpoint.Trained(layer)})
    with fsdpc.deferred_init():
        layer = nn.Linear(2, 2)
    layer.weight.requires_grad = False
    with pytest.raises(RuntimeError, match="frozen parameter 'weight' is deferred"):
        checkpoint.load(tmp_path / "step", {"model": checkpoint.Trained(layer)})
    assert layer.weight.is_deferred and layer.bias.is_deferred


@pytest.mark.ranks([1, 2])
def test_state_dicts_know_their_scheme(tmp_path: Path) -> None:
    save_base(tmp_path / "base"), save_base(tmp_path / "other", 9)
    model, again = adapted(tmp_path / "base"), adapted(tmp_path / "other")
    ids = fsdpc.tensor(np.arange(16).reshape(1, 16))
    state = model.state_dict()
    for given in (state, {name: value.numpy() for name, value in state.items()}):
        again.load_state_dict(given)
        assert np.array_equal(again(ids).bits(), model(ids).bits())
    other = adapted(tmp_path / "base", "int4")
    with pytest.raises(ValueError, match="q_proj.weight: nf4, 128 columns given, int4, 128"):
        other.load_state_dict(state)
    plain = Llama(CONFIG)
    assert model.num_parameters() == plain.num_parameters() + sum(
        int(np.prod(p.shape)) for p in lora.parameters(model)
    )
    with pytest.raises(ValueError, match="not quantised given, nf4, 128 columns wanted"):
        again.load_state_dict(plain.state_dict(), strict=False)


@pytest.mark.ranks(1)
def test_rows_of_equal_bytes_are_told_apart() -> None:
    one, other = (nn.QuantizedLinear(512, 4, scheme=scheme) for scheme in ("nf4", "int4"))
    assert one.weight.shape == other.weight.shape
    with pytest.raises(ValueError, match="weight: nf4, 512 columns given, int4, 512 columns"):
        other.load_state_dict(one.state_dict())
    narrow = nn.QuantizedLinear(8, 4, scheme="nf4")
    with pytest.raises(ValueError, match="weight: nf4, 8 columns given, not quantised wanted"):
        nn.Linear(13, 4).load_state_dict(narrow.state_dict())


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("scheme", ["nf4", "int4", "int8"])
def test_rows_without_columns(scheme: str, tmp_path: Path) -> None:
    def build() -> Any:
        with fsdpc.deferred_init():
            model = nn.Sequential(nn.Linear(0, 3))
        nn.quantize_(model, scheme)
        return fsdpc.fully_shard(model)

    checkpoint.save(tmp_path / "step", {"model": nn.Sequential(nn.Linear(0, 3))})
    model = build()
    checkpoint.load(tmp_path / "step", {"model": model})
    assert model(fsdpc.ones(2, 0)).numpy().shape == (2, 3)


@pytest.mark.ranks(1)
def test_what_quantize_refuses_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with fsdpc.no_grad():
        model[1].weight[3, 2] = float("nan")
    with pytest.raises(ValueError, match="'1': row 3 of a weight has infinities or NaN"):
        nn.quantize_(model)
    assert type(model[0]) is nn.Linear and model[0].weight.requires_grad
    for scheme in ("fp4", None):
        with pytest.raises(ValueError, match=f"one of nf4, int4, int8, got {scheme!r}"):
            nn.quantize_(model, scheme)  # type: ignore[arg-type]
    lora.apply(model, 2, ["0"])
    with pytest.raises(RuntimeError, match="'0' has an adapter: call quantize_\\(\\) before"):
        nn.quantize_(model)
    model = nn.Sequential(nn.Linear(8, 8, dtype="float64"))
    nn.quantize_(model, "int8")
    with pytest.raises(ValueError, match="no linear layers to quantise: they are stored as int8"):
        nn.quantize_(model)
    model = copy.deepcopy(model).bfloat16()
    lora.apply(model, 2)
    assert model(fsdpc.ones(1, 8).to("bfloat16")).dtype.name == "bfloat16"


@pytest.mark.ranks(2)
def test_values_that_cannot_be_encoded_are_named(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(64, 6))
    with fsdpc.no_grad():
        base[0].weight[5, 1] = float("inf")
    checkpoint.save(tmp_path / "step", {"model": base})
    model = nn.Sequential(nn.Linear(64, 6))
    nn.quantize_(model), fsdpc.fully_shard(model)
    with pytest.raises(checkpoint.CheckpointError, match=r"'0.weight' in .*of the rows from \d on"):
        checkpoint.load(tmp_path / "step", {"model": model})


@pytest.mark.ranks(2)
def test_whole_checkpoints_hold_codes(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    model = adapted(tmp_path / "base")
    train(model, 1)
    checkpoint.save(tmp_path / "step", {"model": model})
    again = adapted(tmp_path / "base")
    checkpoint.load(tmp_path / "step", {"model": again})
    ids = fsdpc.tensor(np.arange(16).reshape(1, 16))
    assert np.array_equal(again(ids).bits(), model(ids).bits())
    with pytest.raises(checkpoint.CheckpointError, match=r"2 of them\) *nf4, 128 [^']*'[^=]*$"):
        checkpoint.load(tmp_path / "step", {"model": adapted(tmp_path / "base", "int4")})
    plain = fsdpc.fully_shard(models.from_pretrained(tmp_path / "base"))
    with pytest.raises(checkpoint.CheckpointError, match="nf4, 192 columns +not quantised"):
        checkpoint.load(tmp_path / "step", {"model": plain}, strict=False)


@pytest.mark.ranks(1)
def test_merging_and_what_cannot_be(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    model = adapted(tmp_path / "base", shard=False)
    with pytest.raises(ValueError, match="the model has adapters"):
        models.save_pretrained(model, tmp_path / "merged")
    train(model, 3)
    ids = fsdpc.tensor(np.arange(16).reshape(1, 16))
    before = model(ids).numpy()
    lora.merge(model)
    assert np.allclose(model(ids).numpy(), before, atol=1e-5)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    models.save_pretrained(model, tmp_path / "merged")
    again = models.from_pretrained(tmp_path / "merged")
    assert np.array_equal(again(ids).numpy(), model(ids).numpy())
    model = adapted(tmp_path / "base", shard=False)
    lora.merge(model, "bfloat16")
    assert model.model.layers[0].mlp.up_proj.weight.dtype.name == "bfloat16"
    assert model(ids).dtype.name == "bfloat16"
    model = models.from_pretrained(tmp_path / "base", quantize="nf4")
    lora.apply(model, 4, ["q_proj", "v_proj"])
    before = model(ids).numpy()
    lora.merge(model)
    assert np.allclose(model(ids).numpy(), before, atol=1e-5)
    models.save_pretrained(model, tmp_path / "partly")
    with pytest.raises(TypeError, match="Trained takes a module of fsdpc.nn, got dict"):
        checkpoint.Trained({})
    quantised = models.from_pretrained(tmp_path / "base", quantize="int8")
    for same in (quantised, copy.deepcopy(quantised)):
        with pytest.raises(ValueError, match="the model is quantised: fsdpc.checkpoint.save"):
            models.save_pretrained(same, tmp_path / "again")
    assert quantised.half().model.layers[0].mlp.up_proj.weight.dtype.name == "uint8"
    with pytest.raises(ValueError, match="has no linear layers"):
        nn.quantize_(nn.Sequential(nn.ReLU()))
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    with pytest.raises(RuntimeError, match="other modules use the weight of '0'"):
        nn.quantize_(tied)
    with pytest.raises(RuntimeError, match="quantize_\\(\\) before fully_shard"):
        nn.quantize_(fsdpc.fully_shard(nn.Sequential(nn.Linear(8, 8))))


@pytest.mark.ranks([1, 2])
def test_deferred_values_are_those_of_a_real_model() -> None:
    def build() -> Any:
        fsdpc.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 8))

    real = build()
    assert nn.quantize_(real, "nf4") == ["0", "1"]
    with fsdpc.deferred_init():
        later, sharded = build(), build()
    nn.quantize_(later, "nf4"), nn.quantize_(sharded, "nf4")
    x = fsdpc.ones(2, 64)
    assert np.array_equal(later.materialize()(x).numpy(), real(x).numpy())
    assert np.array_equal(fsdpc.fully_shard(sharded)(x).numpy(), real(x).numpy())
