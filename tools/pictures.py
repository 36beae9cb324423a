"""Draws docs/pictures from the engine itself: python tools/pictures.py [FOLDER]

sharding.svg is fsdpc.sharding_layout of a LLaMA over four ranks, strategies.svg has the bytes of
memory_plan, schedule.svg what fsdpc.schedule recorded of a step. Nothing in them depends
on the machine; tests/unit/test_pictures.py draws them again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsdpc
from fsdpc.display.svg import path as line
from fsdpc.display.svg import picture, rect, save, text
from fsdpc.models import Llama, preset

RANKS = 4
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
STRATEGIES = ["NO_SHARD", "SHARD_OPTIM", "SHARD_GRAD_OP", "FULL_SHARD"]
CLASSES = {
    "unsharded": "parameters as modules read them (one copy a host)",
    "master": "masters",
    "grad": "gradients",
    "state": "AdamW's states",
    "reduce": "reduce buffers",
}


# ---- what a strategy costs ----------------------------------------------------------------------


def draw_strategies(path: Path) -> None:
    """Draw the memory of a rank by strategy, for a LLaMA of 125 M over eight ranks."""
    with fsdpc.deferred_init():
        model = Llama(preset("125M"))
    plans = {name: fsdpc.memory_plan(model, 8, strategy=name) for name in STRATEGIES}
    parts = []
    scale = 500 / max(plan.total for plan in plans.values())
    for i, (name, plan) in enumerate(plans.items()):
        x, y = 130.0, 18.0 + 34 * i
        parts.append(text(120, y + 16, name, "e"))
        for each in CLASSES:
            width = getattr(plan, each) * scale
            parts.append(rect(x, y, width, 24, f"c-{each}"))
            x += width
        parts.append(text(x + 8, y + 16, f"{plan.total / 2**20:,.0f} MiB"))
    for i, (each, words) in enumerate(CLASSES.items()):
        x, y = (130.0, 170.0 + 24 * i) if i < 3 else (480.0, 170.0 + 24 * (i - 3))
        parts += [rect(x, y, 14, 14, f"c-{each}"), text(x + 20, y + 12, words)]
    title = "memory of a rank by strategy"
    save(path, title, picture(250, title, parts, 760))


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
    end = left + column * len(uses)
    parts = [rect(left, 34, end - left, 28, "n")]  # the outermost unit stays whole
    for i, use in enumerate(uses):
        x, did, y = left + column * i, schedule.of(use), 34 + row * units.index(use.unit)
        parts.append(text(x + column / 2, 20, use.phase, "f m"))
        for ahead in schedule.ahead(i):
            if "gather" in schedule.of(ahead):
                at = 34 + row * units.index(ahead.unit)
                parts += [rect(x, at, column, 28, "r4"), text(x + 6, at + 18, "gather", "t4")]
        color = 0 if use.phase == "forward" else 1
        parts += [rect(x, y, column, 28, f"r{color}"), text(x + 6, y + 18, use.phase, f"t{color}")]
        after = end if use.unit == root else x + column
        if "reduce" in did:
            parts.append(rect(after, y + 14, column * 0.9, 14, "r3"))
            parts.append(text(after + 8, y + 25, "reduce", "a t3"))
        if "reshard" in did:
            parts.append(line(f"M{after - 2} {y - 4}v36", "x"))
    for i, unit in enumerate(units):
        name = "outermost unit" if unit == root else f"unit {unit}"
        parts.append(text(left - 12, 52 + row * i, name, "e"))
    y = 34 + row * len(units) + 20
    parts.append(line(f"M{left} {y - 12}v18", "x"))
    told = "reshard: the parameters are given up. Time runs to the right."
    parts.append(text(left + 12, y + 2, told))
    title = "one step, unit by unit"
    save(path, title, picture(row * len(units) + 96, title, parts, width))


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
