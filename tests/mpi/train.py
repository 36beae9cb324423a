"""What a rank does: python train.py RANKS_OF_HOST|launcher [OPTION ...].

Hosts are pretended, of so many ranks, or those that the launcher names. Options: raise or kill
(rank 3, in the third step), deterministic, bf16 or fp16, name of a strategy, no_sync (every other
micro-step is not reduced), late (only its all-reduce is postponed), hold (after it each rank
evaluates, some more often than others), save=FOLDER, unshared (FOLDER is another one on the second
host).
"""

import ctypes
import os
import signal
import sys
import zlib
from contextlib import nullcontext
from typing import Any

import numpy as np

import fsdpc
from fsdpc import nn

OPTIONS = sys.argv[2:]
STRATEGIES = [each.name for each in fsdpc.ShardingStrategy]
DTYPES = {"bf16": fsdpc.bfloat16, "fp16": fsdpc.float16}


def pretend(per_host: int) -> None:
    """Set what a launcher on several hosts would."""
    rank, size = (
        int(next(os.environ[name] for name in names if name in os.environ))
        for names in (("OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    )
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % per_host),
        LOCAL_WORLD_SIZE=str(per_host),
        FSDPC_RUN_ID=f"hosts {os.getppid()}",
    )


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(64, 32)

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return self.last(fsdpc.functional.gelu(self.first(x)))


def options_of_sharding() -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    strategy = next((word for word in OPTIONS if word in STRATEGIES), None)
    if strategy is not None:
        chosen["strategy"] = strategy
        if strategy.startswith("HYBRID") and fsdpc.distributed.world().hosts in (1, 4):
            chosen["mesh"] = fsdpc.init_device_mesh("cpu", (2, 2))  # what two hosts do unasked
    dtype = next((DTYPES[word] for word in OPTIONS if word in DTYPES), None)
    if dtype is not None:
        chosen["mp_policy"] = fsdpc.MixedPrecisionPolicy(param_dtype=dtype)
    return chosen


def fail_on_purpose(step: int) -> None:
    if step == 2 and fsdpc.rank() == 3:
        if "raise" in OPTIONS:
            raise RuntimeError("rank 3 has enough")
        if "kill" in OPTIONS:
            os.kill(os.getpid(), signal.SIGKILL)


def see_another(folder: str) -> None:
    """Let this process have an empty folder of its own there."""
    new_namespace, private = 0x20000, 0x44000
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(new_namespace),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(b"none", folder.encode(), b"tmpfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "no namespace of its own")


def save(model: nn.Module, folder: str) -> None:
    if "unshared" in OPTIONS and fsdpc.rank() >= 2:
        see_another(folder)
    try:
        fsdpc.checkpoint.save(f"{folder}/step", {"model": model})
    except OSError as error:
        sys.stdout.write(f"refused: {error}\n")
        fsdpc.barrier()  # rank 0's claim on the folder goes last
        sys.stdout.write(f"left there: {os.listdir(folder)}\n")


def evaluate(model: Any) -> bytes:
    """What the model makes of ones, which each rank asks as often as it likes."""
    with model.hold(), fsdpc.no_grad():
        for _ in range(1 + fsdpc.rank()):
            y = model(fsdpc.tensor(np.ones((1, 32), np.float32)))
    return y.bits().tobytes()


def main() -> None:
    if sys.argv[1] != "launcher":
        pretend(int(sys.argv[1]))
    fsdpc.init(deterministic="deterministic" in OPTIONS)
    fsdpc.manual_seed(0)
    model = Net()
    sharding = options_of_sharding()
    fsdpc.fully_shard(model.first, **sharding)
    fsdpc.fully_shard(model, **sharding)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = fsdpc.amp.LossScaler() if "fp16" in OPTIONS else None
    rng = np.random.default_rng(fsdpc.rank())
    crc = 0
    for step in range(5):
        fail_on_purpose(step)
        for micro in range(2):
            if "late" in OPTIONS:
                model.set_requires_all_reduce(micro == 1)
            with model.no_sync() if "no_sync" in OPTIONS and micro == 0 else nullcontext():
                x = fsdpc.tensor(rng.standard_normal((8, 32)).astype(np.float32))
                y = model(x)
                loss = (y * y).mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
            if "hold" in OPTIONS and micro == 0:
                crc = zlib.crc32(evaluate(model), crc)
        if scaler is not None:
            scaler.unscale_(optimizer)
        fsdpc.clip_grad_norm_(model, 0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    for folder in (word.removeprefix("save=") for word in OPTIONS if word.startswith("save=")):
        save(model, folder)
    with fsdpc.summon_full_params(model):
        for name, value in model.named_parameters():
            crc = zlib.crc32(name.encode() + value.detach().numpy().tobytes(), crc)
    for name, value in sorted(model.state_dict().items()):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(np.asarray(value)).tobytes(), crc)
    sys.stdout.write(f"crc:{crc:08x} \n")


main()
