"""What a rank of test_hosts_matrix.py does: python hosts_rank.py DOOR FAULT PHASE FOLDER.

It trains two steps, and a third with the fault in it, and saves. Every rank that has no fault
leaves in the folder what it met. What happens to a cable or a launcher is for the test to do, which
the victim waits for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fsdpc  # noqa: E402

DOOR, FAULT, PHASE = sys.argv[1:4]
FOLDER = Path(sys.argv[4])
VICTIM = 3
HOST = (2, 3)  # the ranks of the victim's host
SIGNALS = {"kill": signal.SIGKILL, "host": signal.SIGKILL, "stop": signal.SIGSTOP}
OUTSIDE = ("none", "cable", "outage", "ctrl-c")

Say = Callable[[str], object]


class Oops(Exception):
    """The exception of the victim."""


def strike(phase: str) -> None:
    """Let it happen here, if this is the place and the rank."""
    if phase != PHASE or fsdpc.rank() != VICTIM:
        return
    if FAULT in OUTSIDE:
        (FOLDER / "asked").touch()
        while FAULT != "ctrl-c" and not (FOLDER / "struck").exists():
            time.sleep(0.01)
        return
    (FOLDER / "struck.part").write_text(repr(time.monotonic()))
    (FOLDER / "struck.part").rename(FOLDER / "struck")
    if FAULT in SIGNALS:
        for rank in HOST if FAULT == "host" else (VICTIM,):
            os.kill(int((FOLDER / f"pid{rank}").read_text()), SIGNALS[FAULT])
    elif FAULT == "exit":
        sys.exit(7)
    else:
        raise Oops(phase)


def native() -> tuple[Any, Callable[[Say], object]]:
    from tests.faults.common import build, step

    model = build()
    optimizer = fsdpc.optim.AdamW(model.parameters())
    return model, lambda say: step(model, optimizer, say)


def torch_door() -> tuple[Any, Callable[[Say], object]]:
    import torch

    from fsdpc.torch import fully_shard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    says: list[Say] = [lambda place: None]

    class Middle(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            says[0]("in forward")
            if x.requires_grad:
                x.register_hook(lambda gradient: says[0]("in backward"))
            return x

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Middle(), torch.nn.Linear(8, 8))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(say: Say) -> None:
        says[0] = say
        model(torch.ones(3, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        say("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        fsdpc.barrier()

    return model, step


def whole_run() -> None:
    model, step = native() if DOOR == "native" else torch_door()
    step(lambda place: None)
    step(lambda place: None)
    step(strike)
    while FAULT == "ctrl-c":
        step(lambda place: None)
    strike("save")  # the others are in it
    fsdpc.checkpoint.save(FOLDER / "saved", {"model": model})
    fsdpc.barrier()
    fsdpc.shutdown()


def main() -> None:
    error: BaseException | None = None
    rank = -1
    try:
        if DOOR == "native":
            fsdpc.init()  # sets RANK to what the launcher says
        rank = int(os.environ["RANK"])
        (FOLDER / f"pid{rank}").write_text(str(os.getpid()))
        whole_run()
    except BaseException as caught:
        error = caught
        raise
    finally:
        at = time.monotonic()
        if rank != VICTIM or FAULT in OUTSIDE:
            found = [type(error).__name__, str(error), at]
            (FOLDER / f"rank{rank}").write_text(json.dumps(found))


main()
