"""The picture of a memory plan: well-formed, without scripts, with the numbers of the plan."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

import fsdpc
from fsdpc import nn
from fsdpc.display import svg as _svg
from fsdpc.planning import memory_picture

SVG = "{http://www.w3.org/2000/svg}"


def made(**options: Any) -> fsdpc.MemoryPlan:
    with fsdpc.deferred_init():
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    return fsdpc.memory_plan(model, 4, (8, 512), **options)


def test_a_plan_shows_itself() -> None:
    plan = made()
    text = plan._repr_html_()
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("fill") == "currentColor"
    assert {each.tag.removeprefix(SVG) for each in root.iter()} == {"svg", "title", "rect", "text"}
    bars = [each for each in root.iter(f"{SVG}rect") if each.get("height") == "26"]
    widths = [float(each.get("width", "nan")) for each in bars]
    names = ["unsharded", "master", "grad", "state", "reduce", "activation"]
    sizes = [getattr(plan, name) for name in names]
    assert sum(widths) == pytest.approx(560 - 16, abs=0.05)
    assert widths == pytest.approx([n / plan.total * 544 for n in sizes], abs=0.01)
    ends = [float(each.get("x", "nan")) + width for each, width in zip(bars, widths, strict=True)]
    assert ends[:-1] == pytest.approx([float(each.get("x", "nan")) for each in bars[1:]], abs=0.02)
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert words[0] == f"memory of a rank, {str(plan).splitlines()[-1]}"
    for name, n in (*zip(names, sizes, strict=True), ("total", plan.total)):
        assert words[words.index(name) + 1] == f"{n / 2**20:,.2f} MiB"
    lowest = max(float(each.get("y", "nan")) for each in root.iter(f"{SVG}text"))
    assert lowest + 10 < float(root.get("height", "nan")) < lowest + 20


def test_what_is_beside_has_numbers_alone() -> None:
    plan = made(offload_policy=fsdpc.OffloadPolicy(optimizer="disk", path="/<&>"))
    root = ET.fromstring(plan._repr_html_())
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert plan.file and words[words.index("file") :][:3] == [
        "file", f"{plan.file / 2**20:,.2f} MiB", "not in the total"
    ]  # fmt: skip
    assert "staging" in words


def test_odd_numbers_and_names() -> None:
    empty = ET.fromstring(memory_picture.picture("a < b & c", [("unsharded", 0)]))
    assert empty.find(f"{SVG}text").text == "a < b & c"  # type: ignore[union-attr]
    assert memory_picture.size(3 << 30, 20 << 30) == "3.00 GiB"
    assert memory_picture.size(64, 8448) == "0.06 KiB"


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 has it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                        for c in channels)  # fmt: skip
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_fills_are_seen_on_light_and_on_dark_pages() -> None:
    for name, colour in memory_picture.FILLS.items():
        assert re.fullmatch("#[0-9a-f]{6}", colour)
        on_white = 1.05 / (luminance(colour) + 0.05)
        on_dark = (luminance(colour) + 0.05) / (luminance("#111111") + 0.05)
        assert on_white >= 2.5 and on_dark >= 3, (name, on_white, on_dark)


#: How linear colours look to people without one kind of cones (Machado et al. 2009).
VISION = {
    "all": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.28, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def seen(colour: str, vision: str) -> np.ndarray:
    """A colour in CIELAB, where distances are about equally visible."""
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.asarray(VISION[vision]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.asarray(to_xyz) @ linear / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_differ_for_all_eyes(vision: str) -> None:
    """A distance of 2.3 is just seen."""
    ranks = [fill for fill, _ in _svg.PALETTE]
    for fills in (list(_svg.CLASSES.values()), ranks):
        for a, b in itertools.combinations(fills, 2):
            assert np.linalg.norm(seen(a, vision) - seen(b, vision)) > 9, (a, b)


def test_a_small_plan_has_small_units_and_says_what_is_shared() -> None:
    plan = fsdpc.memory_plan(fsdpc.nn.Linear(4, 4, bias=False), 4)
    text = repr(plan.for_device("cpu"))
    assert "\nmaster               64 B\n" in text and "0.00" not in text
    assert "\n4 ranks of a host share one parameter buffer\n" in text
    assert "share" not in str(plan.for_device("cuda"))
    assert "share" not in str(fsdpc.memory_plan(fsdpc.nn.Linear(4, 4), 1).for_device("cpu"))
