"""The layout of a model is what its ranks hold; pictures of it are well-formed, small and true."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from math import prod
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import _core, nn
from fsdpc.models import Llama, preset
from fsdpc.planning.layout import ShardingLayout
from fsdpc.sharding import rules

from .common import CONFIG, build

SVG = "{http://www.w3.org/2000/svg}"


def deferred(layers: int = 3) -> Llama:
    with fsdpc.deferred_init():
        return Llama(CONFIG.with_(layers=layers))


def check_own_rows(model: Any, layout: ShardingLayout) -> None:
    """What the layout says of this rank is what this rank holds, values included."""
    mine: dict[tuple[str, str], Any] = {}
    for name, p, piece in layout.owned(fsdpc.rank()):
        mine[name, p.name] = piece
    unsharded = {id(p): fsdpc.full_tensor(p).numpy() for p in model.parameters()}
    names = [name for name, _ in rules.sharded_modules(model)]
    assert names == [unit.name for unit in layout.units]
    for name, m in rules.sharded_modules(model):
        unit, own = m._fsdpc_unit, dict(m.named_parameters())
        described = next(each for each in layout.units if each.name == name)
        held = sum(x.nbytes for x in _core.unit_memory(unit, "master"))
        assert described.shard == held
        real = 0
        for i, (path, dtype, shape) in enumerate(unit.params):
            rows = unit.local(i).numpy()
            real += rows.nbytes
            assert described.parameters[i].shape == shape
            assert described.parameters[i].dtype == dtype.name
            piece = mine.pop((name, path), None)
            assert rows.size == (piece.numel if piece else 0)
            if piece:
                whole = unsharded[id(own[path])].reshape(-1)
                part = whole[piece.first : piece.first + piece.numel]
                assert np.array_equal(rows.reshape(-1), part)
        shard_rank = fsdpc.rank() % layout.mesh[1]
        assert described.padding[shard_rank] == held - real
    assert not mine


@pytest.mark.ranks([1, 3, 4])
def test_the_layout_is_what_ranks_hold() -> None:
    model = build(True)
    layout = fsdpc.sharding_layout(model)
    assert layout.mesh == (1, fsdpc.world_size())
    check_own_rows(model, layout)
    assert layout == fsdpc.sharding_layout(deferred(), fsdpc.world_size())
    assert model._repr_html_() == layout._repr_html_()


@pytest.mark.ranks(4)
def test_the_layout_of_a_mesh() -> None:
    model = build(True, mesh=fsdpc.init_device_mesh("cpu", (2, 2)))
    layout = fsdpc.sharding_layout(model)
    assert layout.mesh == (2, 2)
    check_own_rows(model, layout)
    assert "ranks 1, 3 own " in layout._repr_html_()


def test_pieces_add_up_and_the_rest_is_padding() -> None:
    with fsdpc.deferred_init():
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1, dtype=fsdpc.float64))
    for ranks in (1, 2, 3, 64):
        layout = fsdpc.sharding_layout(model, ranks, plan={"1": {}})
        assert [unit.name for unit in layout.units] == ["", "1"]
        plan = fsdpc.memory_plan(model, ranks, plan={"1": {}})
        assert layout.shard <= plan.master < layout.shard + 64 * 3  # an array begins at 64 bytes
        for unit in layout.units:
            for p in unit.parameters:
                ends = [0]
                for piece in p.pieces:
                    assert piece.first == ends[-1] and piece.numel > 0
                    ends.append(piece.first + piece.numel)
                assert ends[-1] == p.numel == prod(p.shape)
            assert sum(unit.padding) == unit.shard * ranks - unit.nbytes


def test_a_large_model_is_small_and_readable() -> None:
    with fsdpc.deferred_init():
        model = Llama(preset("7B"))
    layout = fsdpc.sharding_layout(model, 512)
    drawn = layout._repr_html_()
    root = ET.fromstring(drawn)
    words = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert "model.layers.0 to model.layers.31, x32 Block" in "\n".join(
        each.text or "" for each in root.iter(f"{SVG}title")
    )
    assert len(drawn) < 200_000 and "script" not in drawn
    assert any("neighbours of 8 ranks are one piece" in each for each in words)
    assert "x32 Block" in str(layout) and len(str(layout).splitlines()) < 20


def test_many_parameters_are_small_too() -> None:
    with fsdpc.deferred_init():
        model = nn.Sequential(*[nn.Linear(3 + i % 7, 33) for i in range(450)])
    drawn = fsdpc.sharding_layout(model, 16)._repr_html_()
    ET.fromstring(drawn)
    assert len(drawn) < 1_000_000 and "and 500 more parameters" in drawn


def test_a_strip_shows_its_rows() -> None:
    with fsdpc.deferred_init():
        model = nn.Linear(64, 9, bias=False)
    layout = fsdpc.sharding_layout(model, (2, 4))
    root = ET.fromstring(layout._repr_html_())
    drawn = [each for each in root.iter(f"{SVG}rect") if re.match(r"r\d", each.get("class") or "")]
    strip = {each.find(f"{SVG}title").text: each for each in drawn if len(each)}  # type: ignore[union-attr]
    told = "weight: ranks 1, 5 own rows 3 to 5 of 9, 768 B of float32"
    assert float(strip[told].get("width", "0")) == pytest.approx(440 / 3, abs=0.01)
    assert strip[told].get("class") == "r1"
    assert [piece.numel for piece in layout.units[0].parameters[0].pieces] == [192] * 3
    assert layout.units[0].padding == (0, 0, 0, 768)
    assert "padding of ranks 3, 7: 768 B" in strip


def test_pictures_are_written(tmp_path: Any) -> None:
    layout = fsdpc.sharding_layout(deferred(), 2)
    layout.save(tmp_path / "a.svg")
    layout.save(tmp_path / "a.html")
    ET.parse(tmp_path / "a.svg")
    page = ET.fromstring((tmp_path / "a.html").read_text().removeprefix("<!DOCTYPE html>\n"))
    assert page.find(f".//{SVG}svg") is not None
    with pytest.raises(ValueError, match=r"written as \.svg or \.html, got '.*a\.png'"):
        layout.save(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError, match="no/a.svg"):
        layout.save(tmp_path / "no" / "a.svg")
    with pytest.raises(ValueError, match="a mesh is"):
        fsdpc.sharding_layout(deferred(), 0)
