"""Saving and loading parameters and AdamW states, beside plain writers and readers and torch's DCP.

All in the same processes, on the same disk, one after the other in turn; fsync is counted wherever
something is written, and whatever is read was written just before, next in turn (in the page cache,
if that is large enough; a virtual machine may lose pages to its host in seconds). Plain writers and
readers move as many bytes of one file a rank in 1 MiB calls.

With --device cuda what is saved lies on a GPU, "memcpy" is the copy of it into pinned memory, and
ranks share the cores; else each rank has one thread.

python benchmarks/bench_checkpoint.py [--gb 2] [--ranks 2] [--rounds 3] [--folder .] [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

CHUNK = 1 << 20
LAYERS, WIDTH = 16, 1024


def timed(work: Callable[[], object]) -> float:
    """Seconds of the slowest rank, from a common begin."""
    import fsdpc

    fsdpc.barrier()
    begin = time.perf_counter()
    work()
    return float(fsdpc.all_reduce(time.perf_counter() - begin, "max"))


def plain_write(path: Path, data: np.ndarray) -> None:
    """What dd conv=fsync does."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for at in range(0, data.nbytes, CHUNK):
        os.pwrite(fd, data[at : at + CHUNK], at)
    os.fsync(fd)
    os.close(fd)


def plain_read(path: Path, into: np.ndarray) -> None:
    """What dd does the other way."""
    fd = os.open(path, os.O_RDONLY)
    for at in range(0, into.nbytes, CHUNK):
        os.preadv(fd, [into[at : at + CHUNK]], at)
    os.close(fd)


def plain_scan(folder: Path, buffer: np.ndarray) -> None:
    """Read all tensor files into one small buffer, as one dd of each would."""
    for path in sorted(folder.glob("*.safetensors")):
        fd, at = os.open(path, os.O_RDONLY), 0
        while n := os.preadv(fd, [buffer], at):
            at += n
        os.close(fd)


def build(total_bytes: float) -> tuple[Any, Any]:
    """A sharded model that has, with its states, so many bytes."""
    import fsdpc

    rows = int(total_bytes / 12 / WIDTH / LAYERS)

    class Layers(fsdpc.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = fsdpc.nn.ModuleList(
                [fsdpc.nn.Linear(WIDTH, rows, bias=False) for _ in range(LAYERS)]
            )

        def forward(self) -> None:
            return None

    with fsdpc.deferred_init():
        model = Layers()
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.AdamW(model.parameters())
    for i, p in enumerate(model.parameters()):
        for k, view in enumerate(optimizer.state_views(p).values()):
            fsdpc._core.init_(view, "uniform", 0.0, 1.0, k, i)
        optimizer.set_step_count(p, 1)
    return model, optimizer


def dcp_state(model: Any, optimizer: Any, device: str) -> dict[str, Any]:
    """The same tensors as DTensors over the same memory sizes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    state = {}
    for name, p in model.named_parameters():
        for what, own in {"": p.local.detach(), **optimizer.state_views(p)}.items():
            local = torch.from_dlpack(own).clone().reshape(-1, p.shape[1])
            state[name + what] = DTensor.from_local(
                local, mesh, [Shard(0)], shape=torch.Size(p.shape), stride=(p.shape[1], 1)
            )
    return state


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rows, on this rank."""
    import torch
    import torch.distributed.checkpoint as dcp

    import fsdpc
    from fsdpc import _core, checkpoint

    on_gpu = options.device == "cuda"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    fsdpc.set_default_device(options.device)
    fsdpc.init()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, folder = fsdpc.rank(), Path(options.folder) / "bench_checkpoint.tmp"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    model, optimizer = build(options.gb * 1e9)
    state = {"model": model, "optimizer": optimizer}
    theirs = dcp_state(model, optimizer, options.device)
    own_bytes = sum(t.to_local().nbytes for t in theirs.values())
    data = np.resize(np.random.default_rng(rank).integers(0, 256, CHUNK, np.uint8), own_bytes)
    memory = torch.zeros(own_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    target = memory.numpy()
    plain = folder / f"plain-{rank}"
    blocked: list[float] = []
    dcp_blocked: list[float] = []

    def remove(name: str) -> None:
        fsdpc.barrier()
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
        fsdpc.barrier()

    def save_async() -> float:
        fsdpc.barrier()
        begin = time.perf_counter()
        handle = checkpoint.save(folder / "async", state, async_=True)
        blocked.append(time.perf_counter() - begin)
        handle.wait()
        return time.perf_counter() - begin

    def dcp_async() -> float:
        begin = time.perf_counter()
        future = dcp.async_save(theirs, checkpoint_id=str(folder / "dcp_async"))
        dcp_blocked.append(time.perf_counter() - begin)
        future.result()
        return time.perf_counter() - begin

    def copy_to_host() -> None:
        if not on_gpu:
            np.copyto(target, data)
            return
        at = 0
        for tensor in theirs.values():
            own = tensor.to_local().view(-1).view(torch.uint8)
            memory[at : at + own.numel()].copy_(own, non_blocking=True)
            at += own.numel()
        torch.cuda.synchronize()

    def verify() -> None:
        from fsdpc.checkpoint.source import checksums, open_source

        if rank == 0:  # one process, as `fsdpc ckpt verify`
            checksums(open_source(folder / "ours"))

    def one_reader() -> None:
        if rank == 0:
            plain_scan(folder / "ours", target[:CHUNK])

    rows: dict[str, list[float]] = {}
    for _ in range(options.rounds + 1):
        for name in ("ours", "async", "dcp", "dcp_async"):
            remove(name)
        turns: dict[str, Callable[[], Any]] = {
            "plain write": lambda: plain_write(plain, data),
            "plain read": lambda: plain_read(plain, target),
            "save": lambda: checkpoint.save(folder / "ours", state),
            "load": lambda: checkpoint.load(folder / "ours", state),
            "one reader": one_reader,
            "verify": verify,
            "dcp save": lambda: dcp.save(theirs, checkpoint_id=str(folder / "dcp")),
            "dcp load": lambda: dcp.load(theirs, checkpoint_id=str(folder / "dcp")),
            "memcpy": copy_to_host,
            "async save": save_async,
            "dcp async save": dcp_async,
        }
        for name, work in turns.items():
            rows.setdefault(name, []).append(timed(work))
    rows["async blocking"], rows["dcp async blocking"] = blocked, dcp_blocked
    some = data[: 64 << 20]
    rows["crc32c"] = [timed(lambda: _core.crc32c(0, some)) for _ in range(8)]
    remove(".")
    fsdpc.barrier()
    return {"bytes": own_bytes * fsdpc.world_size(), "crc_bytes": some.nbytes,
            "rows": {name: values[1:] for name, values in rows.items()}}  # fmt: skip


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and the ratios that the goals are about."""
    total, rows = result["bytes"], result["rows"]
    seconds = {name: float(np.median(values)) for name, values in rows.items()}
    common.header()
    print(f"{total / 1e9:.2f} GB of parameters and AdamW states, {options.ranks} ranks\n")
    common.table(
        ("what", "s", "GB/s"),
        [(name, common.spread(values),
          f"{(result['crc_bytes'] if name == 'crc32c' else total) / seconds[name] / 1e9:.2f}")
         for name, values in rows.items()],
    )  # fmt: skip
    goals = [
        ("save, of plain writers' rate", seconds["plain write"] / seconds["save"], ">= 0.90"),
        ("load, of plain readers' rate", seconds["plain read"] / seconds["load"], ">= 0.90"),
        ("save, against DCP", seconds["dcp save"] / seconds["save"], ">= 1.25"),
        ("load, against DCP", seconds["dcp load"] / seconds["load"], ">= 1.4"),
        ("async blocking, in memcpys", seconds["async blocking"] / seconds["memcpy"], "<= 1.2"),
        ("verify, of one reader's rate", seconds["one reader"] / seconds["verify"], ">= 0.80"),
        ("CRC-32C, GB/s a core", result["crc_bytes"] / seconds["crc32c"] / 1e9, ">= 10"),
    ]
    print()
    common.table(("ratio", "measured", "goal"), [(n, f"{v:.2f}", g) for n, v, g in goals])


def main() -> None:
    """Run on ranks, then print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if "RANK" in os.environ:
        common.leave_result(measure(options))
        return
    arguments = [f"--{k}={v}" for k, v in vars(options).items()]
    cores = len(os.sched_getaffinity(0))
    threads = cores // options.ranks if options.device == "cuda" else 1
    os.environ["FSDPC_THREADS"] = str(threads)
    report(common.run_ranks(__file__, arguments, options.ranks, threads=threads), options)


if __name__ == "__main__":
    main()
