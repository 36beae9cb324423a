"""A step with arrays on a disk, beside the same step without, and the disk alone.

    python benchmarks/bench_offload.py [--preset 125M] [--batch 4] [--seq 256] [--rounds 2]
                                       [--path /var/tmp] [--cases none optimizer ...]

Ranks train a LLaMA in fp32 with AdamW and clipping. "Floor" is the greater of the step without a
policy and of (bytes read + written) at the bandwidth of the disk: that of direct reads and writes
in blocks of a chunk, by two threads of each rank at once, measured in the same turn. "Over floor"
is the step over it. Cases that begin with "deepspeed" are ZeRO-3, ZeRO-Offload ("offload": the
optimizer of ZeRO-2, or all of ZeRO-3, in host memory) and ZeRO-Infinity of DeepSpeed on its CPU
accelerator, with transformers' LLaMA of the same shape; they need the package, and its
extensions build when they are first used. Cases that begin with "fsdp2" are PyTorch's fully_shard
on the same model, "fsdp2 offload" with its CPUOffloadPolicy. (torchao's CPUOffloadOptimizer asserts
an accelerator, so it has no case.) A peer's floor is its own step without a policy. Bytes are those
that passes read and wrote; what the page cache moves of params and gradients is not among them, and
is little where memory has room for it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

CASES: dict[str, tuple[tuple[str, ...], float]] = {
    "none": ((), 1.0),
    "optimizer": (("optimizer",), 1.0),
    "optimizer masters": (("optimizer", "masters"), 1.0),
    "optimizer masters, half": (("optimizer", "masters"), 0.5),
    "optimizer masters params": (("optimizer", "masters", "params"), 1.0),
    "everything": (("optimizer", "masters", "gradients", "params"), 1.0),
}
PEERS: dict[str, tuple[int, str, tuple[str, ...]]] = {  # stage; where to, and what of
    "deepspeed": (3, "", ()),
    "deepspeed offload": (2, "cpu", ("optimizer",)),
    "deepspeed offload 3": (3, "cpu", ("optimizer", "param")),
    "deepspeed optimizer": (3, "nvme", ("optimizer",)),
    "deepspeed optimizer params": (3, "nvme", ("optimizer", "param")),
}
FSDP2 = ("fsdp2", "fsdp2 offload")
RANKS, STEPS = 2, 4  # of which the first makes the schedule and the states
BLOCK, BLOCKS = 2 << 20, 192


def bandwidth(folder: str) -> float:
    """Bytes a second of this rank, while the others do the same: one thread reads, one writes."""
    import fsdpc

    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    blocks = [mmap.mmap(-1, BLOCK) for _ in range(2)]
    for block in blocks:
        block.write(os.urandom(BLOCK))
    for k in range(BLOCKS):
        os.pwrite(fd, blocks[0], k * BLOCK)

    def read() -> None:
        for k in range(BLOCKS):
            os.preadv(fd, [blocks[0]], k * BLOCK)

    def write() -> None:
        for k in range(BLOCKS):
            os.pwrite(fd, blocks[1], (k - 8) % BLOCKS * BLOCK)

    threads = [threading.Thread(target=read), threading.Thread(target=write)]
    fsdpc.barrier()
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    fsdpc.barrier()
    os.close(fd)
    return 2 * BLOCK * BLOCKS / seconds


def measured(barrier: Callable[[], object], backward: Callable[[], object],
             update: Callable[[], object]) -> dict[str, Any]:
    """Seconds of a step, and of the update in it: medians of all steps but the first."""
    seconds, in_step = [], []
    for _ in range(STEPS):
        barrier()
        begin = time.perf_counter()
        backward()
        updating = time.perf_counter()
        update()
        barrier()
        seconds.append(time.perf_counter() - begin)
        in_step.append(time.perf_counter() - updating)
    return {"seconds": statistics.median(seconds[1:]), "in_step": statistics.median(in_step[1:])}


def turn(case: str, preset: str, batch: int, seq: int, folder: str) -> dict[str, Any]:
    """Train some steps on this rank."""
    import numpy as np

    import fsdpc

    fsdpc.init()
    classes, fraction = CASES[case]
    policy = None
    if classes:
        where = dict.fromkeys(classes, "disk")
        policy = fsdpc.OffloadPolicy(**where, path=folder, fraction=fraction)
    fsdpc.manual_seed(0)
    with fsdpc.deferred_init():
        model = fsdpc.models.Llama(fsdpc.models.preset(preset))
    for block in model.blocks():
        fsdpc.fully_shard(block, offload_policy=policy)
    fsdpc.fully_shard(model, offload_policy=policy)
    optimizer = fsdpc.optim.AdamW(model.named_parameters(), lr=1e-4)
    words = np.random.default_rng(fsdpc.rank()).integers(0, 256, (batch, seq + 1))
    stats = []

    def backward() -> None:
        stats.append(fsdpc.memory_stats())
        model(words[:, :-1], words[:, 1:]).backward()
        fsdpc.clip_grad_norm_(model, 1.0)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    result = measured(fsdpc.barrier, backward, update)
    stats.append(fsdpc.memory_stats())
    moved = sum(stats[-1][k] - stats[-2][k] for k in ("disk_read_bytes", "disk_written_bytes"))
    result |= {
        "bytes": moved,
        "bandwidth": bandwidth(folder),
        "loss_bits": float(model(words[:, :-1], words[:, 1:]).item()).hex(),
    }
    fsdpc.barrier()
    return result


def torch_start(preset: str, batch: int, seq: int) -> tuple[Any, Any]:
    """A process group; transformers' LLaMA and this rank's words."""
    import bench_torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['BENCH_STORE']}",
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    torch.manual_seed(0)
    model = bench_torch.llama(preset)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model, torch.randint(0, 256, (batch, seq + 1), generator=generator)


def loss_of(model: Any, words: Any) -> Any:
    """Of transformers' LLaMA, engine or not."""
    import torch

    logits = model(input_ids=words[:, :-1]).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, words[:, 1:].flatten())


def fsdp2_turn(case: str, preset: str, batch: int, seq: int, folder: str) -> dict[str, Any]:
    """The same steps under PyTorch's FSDP2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    model, words = torch_start(preset, batch, seq)
    policy = CPUOffloadPolicy(pin_memory=False) if case == "fsdp2 offload" else OffloadPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def backward() -> None:
        loss_of(model, words).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return measured(dist.barrier, backward, update)


def deepspeed_turn(case: str, preset: str, batch: int, seq: int, folder: str) -> dict[str, Any]:
    """The same steps under DeepSpeed."""
    import deepspeed  # type: ignore[import-not-found]
    import torch.distributed as dist

    model, words = torch_start(preset, batch, seq)
    stage, device, names = PEERS[case]
    place = {"device": device, "nvme_path": folder, "pin_memory": False}
    parts: dict[str, Any] = {f"offload_{part}": place for part in names}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **parts},
        "aio": {"block_size": BLOCK, "queue_depth": 8, "intra_op_parallelism": 1,
                "single_submit": False, "overlap_events": True},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return measured(dist.barrier, lambda: engine.backward(loss_of(engine, words)), engine.step)


def main() -> None:
    """Run the turns and print the rows."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="125M")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--path", default="/var/tmp")
    p.add_argument("--cases", nargs="+", choices=[*CASES, *PEERS, *FSDP2], default=list(CASES))
    p.add_argument("--turn", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.turn:
        run = deepspeed_turn if o.turn in PEERS else fsdp2_turn if o.turn in FSDP2 else turn
        common.leave_result(run(o.turn, o.preset, o.batch, o.seq, o.path))
        return
    with tempfile.TemporaryDirectory(dir=o.path) as folder:
        shape = ["--preset", o.preset, "--batch", str(o.batch), "--seq", str(o.seq)]
        found: dict[str, list[dict[str, Any]]] = {case: [] for case in o.cases}
        for _ in range(o.rounds):
            for case in o.cases:
                arguments = ["--turn", case, *shape, "--path", folder]
                found[case].append(common.run_ranks(__file__, arguments, RANKS, timeout=1800))
    report(o, found)


def report(o: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    """Print the rows, and that losses after the last step have the same bits."""
    common.header()
    print(f"LLaMA {o.preset}, fp32, {RANKS} ranks, batch {o.batch} x {o.seq} a rank, AdamW, "
          f"{o.rounds} rounds\n")  # fmt: skip

    def median(case: str, key: str) -> float:
        return statistics.median(turn.get(key, float("nan")) for turn in found[case])

    ours = [turn for case, turns in found.items() if case in CASES for turn in turns]
    speed = statistics.median(turn["bandwidth"] for turn in ours) if ours else float("nan")
    rows = []
    for case, turns in found.items():
        base = "none" if case in CASES else case.split()[0]
        alone = median(base, "seconds") if base in found else float("nan")
        moved = median(case, "bytes")
        floor = alone if case not in CASES else max(alone, moved / speed)
        seconds = [turn["seconds"] for turn in turns]
        rows.append([
            case, common.spread(seconds), f"{median(case, 'in_step'):.3g}", f"{moved / 1e9:.2f}",
            f"{moved / speed:.3g}", f"{floor:.3g}", f"{statistics.median(seconds) / floor:.2f}",
            f"{median(case, 'peak_pss_bytes') / 2**20:.0f}",
        ])  # fmt: skip
    common.table(
        ["on the disk", "step s", "of it optimizer", "GB moved a rank", "at the disk's speed s",
         "floor s", "over floor", "peak PSS MiB, both"], rows)  # fmt: skip
    print(f"\nThe disk: {RANKS * speed / 1e6:.0f} MB/s, half read and half written.")
    bits = {turn["loss_bits"] for turn in ours}
    print(f"Losses after {STEPS} steps: {'the same bits' if len(bits) == 1 else sorted(bits)}.")


if __name__ == "__main__":
    main()
