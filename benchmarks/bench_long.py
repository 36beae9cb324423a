"""The longest sequence that one rank trains within 4 GiB.

Each way trains two steps with AdamW, one sequence a step, in a process of its own, at two lengths.
Memory is the process's peak (VmHWM), with Python and the model's states. It grows with the length
in a straight line, which says how long a sequence fits. "Planned" is the same line from
``memory_plan``, without Python and its libraries. "Disk" puts activations there, and "tiles" are
MLPs in tiles of 512 tokens. The peer is transformers' LLaMA with its own checkpoints.

python benchmarks/bench_long.py [--presets 2M 10M 125M] [--lengths 4096,8192] [--path /var/tmp]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import numpy as np

import fsdpc

BUDGET_MIB = 4096
TILE = 512
WAYS: dict[str, tuple[bool, bool, bool]] = {  # blocks recompute; tiles; on a disk
    "fsdpc": (False, False, False),
    "fsdpc, disk": (False, False, True),
    "fsdpc, recomputing": (True, False, False),
    "fsdpc, recomputing, tiles, disk": (True, True, True),
    "torch, recomputing": (True, False, False),
    "fsdpc.torch, recomputing, tiles, disk": (True, True, True),
}


def peak() -> float:
    """The memory that this process has had at most, in MiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(s.split()[1]) for s in status.splitlines() if s.startswith("VmHWM")) / 1024


def policy_of(way: str, path: str) -> Any:
    return fsdpc.OffloadPolicy(activations="disk", path=path) if WAYS[way][2] else None


def native(preset: str, length: int, way: str, path: str) -> tuple[Any, Any]:
    """A sharded model; and a function that runs a micro-step."""
    recomputes, tiles, _ = WAYS[way]
    fsdpc.manual_seed(0)
    config = dataclasses.replace(fsdpc.models.preset(preset), max_seq=length)
    with fsdpc.deferred_init():
        model = fsdpc.models.Llama(config)
    if tiles:
        fsdpc.tile_tokens([block.mlp for block in model.blocks()], TILE)
    if recomputes:
        fsdpc.checkpoint_activations(model.blocks())
    policy = policy_of(way, path)
    for block in model.blocks():
        fsdpc.fully_shard(block, offload_policy=policy)
    fsdpc.fully_shard(model, offload_policy=policy)
    words = np.random.default_rng(0).integers(0, 256, (1, length))
    optimizer = fsdpc.optim.AdamW(model.parameters())
    return (model, optimizer), lambda: model(words, words)


def with_torch(preset: str, length: int, way: str, path: str) -> tuple[Any, Any]:
    """The same over transformers' model."""
    import bench_torch
    import torch

    torch.manual_seed(0)
    model = bench_torch.llama(preset)
    model.config.max_position_embeddings = length
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    words = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(0))
    if way == "torch, recomputing":
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        from fsdpc.integrations.transformers import fuse_loss
        from fsdpc.torch import optim, shard_by_plan, tile_tokens

        fuse_loss(model)
        tile_tokens([layer.mlp for layer in model.model.layers], TILE)
        shard_by_plan(model, classes=["LlamaDecoderLayer"], offload_policy=policy_of(way, path))
        optimizer = optim.AdamW(model.parameters())
    return (model, optimizer), lambda: model(input_ids=words, labels=words).loss


def turn(preset: str, length: int, way: str, path: str) -> dict[str, Any]:
    """Train two steps."""
    (model, optimizer), forward = (with_torch if "torch" in way else native)(
        preset, length, way, path
    )
    planned = None
    if "torch" not in way:
        planned = fsdpc.memory_plan(model, batch_shape=(1, length)).total / 2**20
    for _ in range(2):
        begin = time.perf_counter()
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
    return {
        "peak": peak(),
        "planned": planned,
        "seconds": seconds,
        "file": fsdpc.memory_stats()["disk_file_bytes"] / 2**20,
    }


def fits(lengths: tuple[int, int], sizes: list[float]) -> str:
    """The length at which a straight line reaches the budget."""
    per_token = (sizes[1] - sizes[0]) / (lengths[1] - lengths[0])
    return f"{lengths[0] + (BUDGET_MIB - sizes[0]) / per_token:,.0f}"


def main() -> None:
    """Print a row for each preset and way."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--presets", nargs="+", default=["2M", "10M", "125M"])
    p.add_argument("--lengths", default="4096,8192")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    p.add_argument("--path", default="/var/tmp")
    p.add_argument("--turn", nargs=3, help=argparse.SUPPRESS)  # preset, length, way
    o = p.parse_args()
    if o.turn:
        preset, length, way = o.turn
        print(json.dumps(turn(preset, int(length), way, o.path)))
        return
    common.header()
    lengths = tuple(int(n) for n in o.lengths.split(","))
    rows = []
    for preset in o.presets:
        for way in o.ways:
            found = []
            for length in lengths:
                done = subprocess.run(
                    [sys.executable, __file__, "--path", o.path,
                     "--turn", preset, str(length), way],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                found.append(json.loads(done.stdout.splitlines()[-1]))
            planned = "" if found[0]["planned"] is None else fits(
                lengths, [each["planned"] for each in found]
            )  # fmt: skip
            rows.append([
                preset, way, *(f"{each['peak']:.0f}" for each in found),
                fits(lengths, [each["peak"] for each in found]), planned,
                f"{found[1]['seconds']:.1f}", f"{found[1]['file']:.0f}",
            ])  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    common.table(
        ["model", "way", *(f"MiB at {n}" for n in lengths), "longest in 4 GiB", "planned",
         f"s a step at {lengths[1]}", "MiB on the disk"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
