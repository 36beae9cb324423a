"""The table printed by ``fsdpc plan --gpus``, which lists the models that fit on given GPUs."""

from __future__ import annotations

import argparse
import re
from typing import Any

from fsdpc import lora, models
from fsdpc.display.svg import size
from fsdpc.models import Llama
from fsdpc.nn.module import deferred_init
from fsdpc.planning.memory_plan import memory_plan
from fsdpc.sharding.activation import checkpoint_activations
from fsdpc.sharding.offload import OffloadPolicy

LORA_RANK = 16
#: Each column's options for ``fsdpc train``.
_OPTIONS = (
    "--strategy FULL_SHARD",
    "--offload masters=host,optimizer=host",
    f"--lora {LORA_RANK} --init-from FOLDER",
)


def gpus(text: str) -> tuple[int, float]:
    """Parse a string such as "4x24GB", meaning 4 GPUs with 24 GiB each."""
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)(?:GB|GiB)?", text.strip())
    if not found or int(found[1]) < 1 or float(found[2]) <= 0:
        raise argparse.ArgumentTypeError(f"GPUs and GiB of each, as 4x24GB, got '{text}'")
    return int(found[1]), float(found[2])


def _memory(preset: str, ranks: int, shape: tuple[int, int], policy: Any) -> tuple[float, ...]:
    """Return bytes per GPU for full training, for an optimizer on the host, and for adapters."""
    host = OffloadPolicy(masters="host", optimizer="host")
    found = []
    for adapters in (False, True):
        with deferred_init():
            model = Llama(models.preset(preset))
        if adapters:
            lora.apply(model, LORA_RANK)
        checkpoint_activations(model.blocks(), "all")
        ways = (None,) if adapters else (None, host)
        plans = [
            memory_plan(model, (1, ranks), mp_policy=policy, offload_policy=way) for way in ways
        ]
        activation = memory_plan(model, 1, shape, mp_policy=policy).activation or 0
        found += [plan.for_device("cuda").total + activation for plan in plans]
    return tuple(found)


def table(ranks: int, memory: float, batch: int, seq: int, policy: Any) -> str:
    """Return one row per preset, with the GPU memory it needs and whether it fits.

    Parameters
    ----------
    ranks : int
        Number of GPUs.
    memory : float
        Memory per GPU in bytes.
    batch, seq : int
        Sequences per rank, and tokens per sequence.
    policy : MixedPrecisionPolicy
    """

    def cell(needed: float) -> str:
        short = size(needed) if needed < 2**30 else f"{needed / 2**30:.1f} GiB"
        over = needed - memory
        return short + (" fits" if over <= 0 else f", {over / 2**30:.1f} over")

    heads = "all of it", "optimizer on the host", f"LoRA of rank {LORA_RANK}"
    lines = [f"{'model':11}" + "".join(f"{head:23}" for head in heads).rstrip()]
    rows = {}
    for name in models.PRESETS:
        rows[name] = _memory(name, ranks, (batch, seq), policy)
    ordered = sorted(rows.items(), key=lambda row: row[1])
    for name, needed in ordered:
        lines.append(f"{name:11}" + "".join(f"{cell(n):23}" for n in needed).rstrip())
    lines.append("the largest of each column, with its options of fsdpc train:")
    for column, options in enumerate(_OPTIONS):
        fitting = [name for name, needed in ordered if needed[column] <= memory]
        lines.append(f"  {fitting[-1] if fitting else 'none':11}{options}")
    return "\n".join(lines)
