"""GPT-2's projections of old checkpoints: (out, in), refused by name, and turned by a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, checkpoint, nn
from fsdpc.checkpoint import CheckpointError
from fsdpc.checkpoint.convert import convert
from fsdpc.models import GPT2, gpt2

from .common import CONFIG, by_blocks, llama, values
from .test_command import output

WORDS = np.arange(24, dtype=np.int64).reshape(2, 12)
PART = "transformer.h.0.attn.c_proj"
SQUARE = CONFIG.with_(inner=CONFIG.dim)
REFUSED = r"as \(out, in\), as fsdpc once saved them.*c_attn.*'fsdpc ckpt convert --turn-gpt2"


class OldProjection(nn.Linear):
    def __init__(self, in_features: int, out_features: int, std: float, *_: object) -> None:
        super().__init__(in_features, out_features, std=std)


class OldExpansion(OldProjection):
    def forward(self, x: Any) -> Any:
        return _core.linear_gelu(x, self.weight, self.bias)


def old(config: Any = CONFIG) -> Any:
    """The model as it was: of Linears."""
    fsdpc.manual_seed(3)
    with mock.patch.multiple(gpt2, Projection=OldProjection, Expansion=OldExpansion):
        return by_blocks(GPT2(config))


def new(config: Any = CONFIG) -> Any:
    fsdpc.manual_seed(4)
    return by_blocks(GPT2(config))


def trained(model: Any, steps: int = 2) -> dict[str, Any]:
    state = {"model": model, "optimizer": fsdpc.optim.AdamW(model.parameters(), lr=1e-2)}
    for _ in range(steps):
        model(WORDS, WORDS).backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state


def logits(model: Any) -> Any:
    with fsdpc.no_grad():
        return model(WORDS).numpy()


def version(folder: Path) -> int:
    return json.loads((folder / "manifest.json").read_text())["version"]


@pytest.mark.ranks([1, 2])
@pytest.mark.parametrize("config", [CONFIG, SQUARE], ids=["wide", "square"])
def test_old_ones_are_refused_and_nothing_is_read(config: Any, tmp_path: Path) -> None:
    was = old(config)
    checkpoint.save(tmp_path / "c", {"model": was})
    assert version(tmp_path / "c") == 1  # and so did those who wrote them
    model = new(config)
    before = values(model)
    for path in (tmp_path / "c", tmp_path / "c" / "model.safetensors"):
        for options in ({}, {"strict": False}, {"names": "gpt2"}):
            with pytest.raises(CheckpointError, match=REFUSED):
                checkpoint.load(path, {"model": model}, **options)
    part = model.transformer.h[0].attn.c_proj  # square: its shape says nothing, the others' do
    with pytest.raises(CheckpointError, match=r"\(out, in\), as fsdpc once saved them"):
        checkpoint.load(
            tmp_path / "c", {"model": part}, strict=False, names=lambda n: f"{PART}.{n}"
        )
    assert values(model) == before
    checkpoint.load(tmp_path / "c", {"model": old(config)})  # a custom model that is so


@pytest.mark.ranks([1, 2])
def test_a_part_of_squares(tmp_path: Path) -> None:
    """Of version 2 it is read; of version 1 nothing tells, so it is refused."""
    for how, make in (("old", old), ("new", new)):
        part = make(SQUARE).transformer.h[0].mlp
        checkpoint.save(tmp_path / how, {"model": part})
    want = values(part)
    part = old(SQUARE).transformer.h[0].mlp
    checkpoint.load(tmp_path / "old", {"model": part})
    part = new(SQUARE).transformer.h[0].mlp
    part.c_fc.weight.local.fill_(3.0)
    checkpoint.load(tmp_path / "new", {"model": part})
    assert values(part) == want
    with pytest.raises(CheckpointError, match=r"'c_fc.weight' is \(48, 48\), and nothing there"):
        checkpoint.load(tmp_path / "old", {"model": part})
    assert values(part) == want


@pytest.mark.ranks(1)
@pytest.mark.parametrize("apart", [False, True])
def test_they_are_turned(apart: bool, tmp_path: Path) -> None:
    """With the optimizer's states; the run goes on as it would have, to the bit."""
    state = trained(old())
    checkpoint.save(tmp_path / "c", state)
    source = tmp_path / "c"
    if apart:
        source = tmp_path / "apart"
        convert(tmp_path / "c", source, "per_rank", 3)
        assert version(source) == 1
        with pytest.raises(CheckpointError, match=REFUSED):
            checkpoint.load(source, {"model": new()})
    assert output("convert", "--turn-gpt2", source, tmp_path / "turned")[0] == 0
    assert version(tmp_path / "turned") == 2
    again = trained(new(), 0)
    checkpoint.load(tmp_path / "turned", again)
    np.testing.assert_array_equal(logits(again["model"]), logits(state["model"]))
    for each in (state, again):
        each["model"](WORDS, WORDS).backward()
        each["optimizer"].step()
    np.testing.assert_array_equal(logits(again["model"]), logits(state["model"]))
    code, text = output("convert", "--turn-gpt2", tmp_path / "turned", tmp_path / "twice")
    assert code == 1 and "nothing to turn" in text and not (tmp_path / "twice").exists()
    assert output("convert", tmp_path / "turned", tmp_path / "kept")[0] == 0
    assert version(tmp_path / "kept") == 2
    for form in ("torch", "dcp"):
        assert output("convert", "--turn-gpt2", source, tmp_path / form, "--layout", form)[0] == 0
        assert output("convert", tmp_path / form, tmp_path / f"from-{form}")[0] == 0
        code, text = output("diff", tmp_path / f"from-{form}", tmp_path / "turned")
        assert code == 0, text


@pytest.mark.ranks(1)
def test_other_models_stay_of_version_1(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "llama", {"model": llama()})
    checkpoint.save(tmp_path / "gpt2", {"model": new()})
    assert (version(tmp_path / "llama"), version(tmp_path / "gpt2")) == (1, 2)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit.*missing"):
        checkpoint.load(tmp_path / "llama", {"model": new()})
