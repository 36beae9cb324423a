"""Ranks on the emulated GPU, over NCCL, that train by graphs; prints what each returned as JSON.

    graph_ranks.py WHAT DEVICE RANKS [ARGUMENT]
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from graphs import WARM_UP, Run, attempt, with_a_graph
from ranks import variants
from training import ON_GPU

import fsdpc

CASES = {2: {"FULL_SHARD": "dropping bf16", "SHARD_OPTIM": "perceptron fp32",
             "NO_SHARD": "perceptron fp32"},
         4: {"HYBRID_SHARD 2x2": "perceptron fp32"}}


def replays(_: str) -> dict[str, Any]:
    """Compare each training, by strategy, to itself without a graph."""
    results = {}
    for strategy, case in CASES[fsdpc.world_size()].items():
        plain, graph = (Run(*case.split(), **variants()[strategy]) for _ in range(2))
        fsdpc.manual_seed(1)
        plain.eager(7)
        fsdpc.manual_seed(1)
        results[strategy] = [plain.outcome(), with_a_graph(graph).outcome()]
    return results


def still(_: str) -> list[Any]:
    """Make three replays, and a step, while the device stands still; waits, and what came of it."""
    plugin = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"])
    plain, graph = Run("perceptron"), Run("perceptron")
    plain.eager(WARM_UP + 1 + 3 + 1)
    graph.eager(WARM_UP)
    step = graph.capture()
    batches = [[fsdpc.tensor(x) for x in graph.batch_of(graph.rng)] for _ in range(4)]
    fsdpc.distributed.barrier()
    before = plugin.emu_waits()
    plugin.emu_stall(1)
    try:
        for batch in batches:
            for tensor, new in zip(graph.batch, batch, strict=True):
                tensor.copy_(new)
            if batch is batches[-1]:
                graph.made = graph.body()
            else:
                step.replay()
            graph.scheduler.step()
    finally:
        waits = plugin.emu_waits() - before
        plugin.emu_stall(0)
    graph.losses, graph.norms = plain.losses[:-1], plain.norms[:-1]
    graph.losses.append(float(graph.made[0]))
    graph.norms.append(float(graph.made[1]))
    return [waits, plain.outcome(), graph.outcome()]


def give_up(run: Run) -> None:
    """Rank 1 does not end its step."""
    run.model(*run.batch).backward()
    if fsdpc.rank() == 1:
        raise KeyError("enough")
    fsdpc.clip_grad_norm_(run.model, 1)
    run.optimizer.step()
    run.optimizer.zero_grad()


def stop_midway(run: Run) -> None:
    """Rank 1 does not come to its second layer, for which all have gathers ahead."""
    layer, forward = run.model.hidden[1], run.model.hidden[1].forward
    if fsdpc.rank() == 1:
        layer.forward = lambda x: {}["enough"]
    try:
        run.body()
    finally:
        layer.forward = forward


def leave_gradients(run: Run) -> None:
    """Rank 1 keeps what it should drop."""
    run.body()
    if fsdpc.rank() == 1:
        run.model(*run.batch).backward()


def clip_alone(run: Run) -> None:
    """Rank 1 asks for a norm, the others do not."""
    run.model(*run.batch).backward()
    if fsdpc.rank() == 1:
        fsdpc.clip_grad_norm_(run.model, 1)
    run.optimizer.step()
    run.optimizer.zero_grad()


def exchange(run: Run) -> None:
    """The hosts wait for each other."""
    run.model(*run.batch).backward()
    fsdpc.distributed.barrier()


def mistakes(_: str) -> dict[str, Any]:
    """Do what one rank alone does wrong; what all learn, and what training comes to."""
    plain, run = Run("perceptron"), Run("perceptron")
    run.eager(WARM_UP)
    messages = {}

    def capture(run: Run, body: Any) -> None:
        with fsdpc.graph_step(run.model, run.optimizer):
            body(run)

    for body in (give_up, leave_gradients, clip_alone, exchange):
        messages[body.__name__] = attempt(lambda: capture(run, body))  # noqa: B023
        run.eager(2)  # the first is recorded
    step = run.capture()
    run.replay(step)
    if fsdpc.rank() == 1:
        run.model.load_state_dict(run.model.state_dict(), strict=True)
    else:
        run.model.state_dict()
    messages["weights"] = attempt(step.replay)
    run.eager()
    run.replay(step)
    if not ON_GPU:  # no slots there: these unsharded parameters are below a granule
        with run.model.hold(), fsdpc.no_grad():
            run.model(*run.batch)
        messages["parted"] = attempt(step.replay)
        run.eager(2)  # the first is recorded
    run.replay(run.capture())
    if fsdpc.rank() == 1:
        assert run.model.hidden[0].wide.weight.local.shape == (20, 24)
    messages["handed out"] = attempt(run.capture)
    plain.eager(len(run.losses))
    near, far = Run("perceptron"), Run("perceptron")
    far.model.set_prefetch_distance(2)
    far.eager(WARM_UP)
    messages["stop_midway"] = attempt(lambda: capture(far, stop_midway))
    far.eager(2)
    near.eager(len(far.losses))
    return {"messages": messages, "outcomes": [[plain.outcome(), run.outcome()],
                                               [near.outcome(), far.outcome()]]}


def apart(how: str) -> str:
    """Rank 1 does something else than replay."""
    run = Run("perceptron")
    run.eager(WARM_UP)
    steps = []
    for _ in range(2):
        steps.append(run.capture())
        run.eager(2)  # a graph holds the memory that a step takes
    if fsdpc.rank() == 0:
        return attempt(lambda: run.replay(steps[0], 100))
    return attempt(lambda: run.replay(steps[1], 100) if how == "another" else run.eager(1))


def pending(path: str) -> None:
    """Rank 1 is killed behind a replay that its device has not begun; what rank 0 learns."""
    plugin = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"])
    run = Run("perceptron")
    run.eager(WARM_UP)
    step = run.capture()
    run.load()
    fsdpc.distributed.barrier()
    if fsdpc.rank() == 1:
        plugin.emu_stall(1)
    step.replay()
    if fsdpc.rank() == 1:
        Path(path).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    text = attempt(lambda: float(run.made[0]))
    Path(f"{path}-0").write_text(json.dumps([text, time.monotonic()]))


def work(what: str, device: str, argument: str) -> Any:
    """Be one rank."""
    fsdpc.set_default_device(device)
    fsdpc.init()
    return globals()[what](argument)


def main() -> None:
    """Launch the ranks."""
    what, device, ranks, *rest = sys.argv[1:]
    print(json.dumps(fsdpc.launch(work, int(ranks), what, device, *(rest or [""]), timeout=200)))


if __name__ == "__main__":
    main()
