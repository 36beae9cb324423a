"""Draws docs/pictures from the engine itself: python tools/pictures.py [FOLDER]

sharding.svg is fsdpc.sharding_layout of a LLaMA over four ranks, strategies.svg has the bytes of
memory_plan, schedule.svg what fsdpc.schedule recorded of a step.  Nothing in them depends
on the machine; tests/unit/test_pictures.py draws them again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsdpc
from fsdpc.models import Llama, preset

RANKS = 4
COLORS = ["#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3"]
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
STRATEGIES = ["NO_SHARD", "SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD"]
CLASSES = {
    "wire": "parameters as modules read them (one copy a host)",
    "master": "masters",
    "grad": "gradients",
    "state": "AdamW's states",
    "reduce": "reduce buffers",
}


class Picture:
    """An SVG, shape by shape."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="12" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, more: str = "") -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
        self.parts.append(f'<rect {at} fill="{fill}" {more}/>'.replace(" />", "/>"))

    def text(self, x: float, y: float, text: object, more: str = "") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'.replace(" >", ">")
        )

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


# ---- what a strategy costs ----------------------------------------------------------------------


def draw_strategies(path: Path) -> None:
    """Draw the memory of a rank by strategy, for a LLaMA of 125 M over eight ranks."""
    with fsdpc.deferred_init():
        model = Llama(preset("125M"))
    plans = {name: fsdpc.memory_plan(model, 8, strategy=name) for name in STRATEGIES}
    picture = Picture(760, 250, "memory of a rank by strategy")
    scale = 500 / max(plan.total for plan in plans.values())
    for i, (name, plan) in enumerate(plans.items()):
        x, y = 130.0, 18.0 + 34 * i
        picture.text(120, y + 16, name, 'text-anchor="end"')
        for each, color in zip(CLASSES, COLORS):
            width = getattr(plan, each) * scale
            picture.box(x, y, width, 24, color, 'stroke="#ffffff"')
            x += width
        picture.text(x + 8, y + 16, f"{plan.total / 2**20:,.0f} MiB")
    for i, (each, color) in enumerate(zip(CLASSES, COLORS)):
        x, y = (130.0, 170.0 + 24 * i) if i < 3 else (480.0, 170.0 + 24 * (i - 3))
        picture.box(x, y, 14, 14, color)
        picture.text(x + 20, y + 12, CLASSES[each])
    picture.save(path)


# ---- what a step does ---------------------------------------------------------------------------


def recorded() -> fsdpc.Schedule | None:
    """Return, on a rank, the schedule of a model of three blocks."""
    from fsdpc import nn

    fsdpc.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 8))
    for block in list(model)[1:4]:
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    for _ in range(2):
        model(fsdpc.ones((2, 8))).sum().backward()
    return fsdpc.schedule(model)


def draw_schedule(path: Path) -> None:
    """Draw a step: a row a unit, a column each time one computes."""
    schedule: Any = fsdpc.launch(recorded, 2)[0]
    uses, root = schedule.uses, schedule.uses[0].unit
    units = [root, *sorted({use.unit for use in uses} - {root})]
    left, column, row = 130, 84, 44
    width = left + column * (len(uses) + 1) + 16
    picture = Picture(width, row * len(units) + 96, "one step, unit by unit")
    end = left + column * len(uses)
    picture.box(left, 34, end - left, 28, "#d9e2f0")  # the outermost unit stays whole
    for i, use in enumerate(uses):
        x, did, y = left + column * i, schedule.of(use), 34 + row * units.index(use.unit)
        picture.text(x + column / 2, 20, use.phase, 'text-anchor="middle" fill="#555555"')
        for ahead in schedule.ahead(i):
            if "gather" in schedule.of(ahead):
                at = 34 + row * units.index(ahead.unit)
                picture.box(x, at, column, 28, "#ead7a4")
                picture.text(x + 6, at + 18, "gather")
        picture.box(x, y, column, 28, COLORS[0 if use.phase == "forward" else 1])
        picture.text(x + 6, y + 18, use.phase, 'fill="#ffffff"')
        after = end if use.unit == root else x + column
        if "reduce" in did:
            picture.box(after, y + 14, column * 0.9, 14, COLORS[2])
            picture.text(after + 8, y + 25, "reduce", 'font-size="10" fill="#ffffff"')
        if "reshard" in did:
            picture.box(after - 3, y - 4, 3, 36, "#222222")
    for i, unit in enumerate(units):
        name = "outermost unit" if unit == root else f"unit {unit}"
        picture.text(left - 12, 52 + row * i, name, 'text-anchor="end"')
    y = 34 + row * len(units) + 20
    picture.box(left, y - 12, 3, 18, "#222222")
    picture.text(left + 12, y + 2, "reshard: the parameters are given up. Time runs to the right.")
    picture.save(path)


def main(folder: Path) -> None:
    """Draw all of them."""
    folder.mkdir(exist_ok=True)
    with fsdpc.deferred_init():
        model = Llama(preset("2M"))
    fsdpc.sharding_layout(model, RANKS).save(folder / "sharding.svg")
    draw_strategies(folder / "strategies.svg")
    draw_schedule(folder / "schedule.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
