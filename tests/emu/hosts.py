"""One rank of several hosts, whose GPU is the emulated one; prints what it found as JSON.

    hosts.py WHAT [ARGUMENT]

Its environment is torchrun's, with STORE, a file by which gloo's ranks find each other; or that of
mpiexec. With PRETEND it is on a host of LOCAL_WORLD_SIZE ranks, else on the one that it sees.
With HERE, numbers of ranks, it is all of these, forked once torch is imported, which takes longer
than most of what they do. They write to files of the folder SAID, and it prints how they ended.
WHAT is a function of this file, of ranks.py or of graph_ranks.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import graph_ranks
import numpy as np
import ranks
import torch.distributed as dist
from training import MODELS, build

import fsdpc
from fsdpc.torch import _mesh, _transport


def number(*names: str) -> int:
    """Of the first variable that is set."""
    return int(next(os.environ[name] for name in names if name in os.environ))


def forked() -> bool:
    """Become each rank of HERE; False in the one that waits for them."""
    folder = Path(os.environ["SAID"])
    children = []
    for rank in map(int, os.environ["HERE"].split()):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % LOCAL)}
            said = os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            return True
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(ends))
    return False


LOCAL = number("LOCAL_WORLD_SIZE")
if "HERE" in os.environ and not forked():
    sys.exit()
RANK = number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
links: list[Any] = []


def noted(group: Any, hosts: int) -> Any:
    """Carry bytes between hosts, and remember by what."""
    links.append(_transport.carry(group, hosts))
    return links[-1]


def join() -> None:
    """Join the other ranks; gloo or MPI carries what the engine's control says to other hosts."""
    if "PRETEND" in os.environ:
        host = RANK // LOCAL
        os.environ |= {"NCCL_HOSTID": f"host{host}", "LOCAL_RANK": str(RANK % LOCAL)}
        _mesh.this_host = lambda: (f"boot {host}", f"node{host}")
    if "STORE" not in os.environ:
        size = number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(size),
                       "FSDPC_RUN_ID": f"hosts {os.getppid()}"}
        fsdpc.init()
        return
    _mesh.carry = noted
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=RANK,
                            world_size=int(os.environ["WORLD_SIZE"]))
    _mesh.join()


def trained(name: str) -> dict[str, Any]:
    """Train under every strategy, as ranks of one host do; where this rank is, and its GPU."""
    world = fsdpc.distributed.world()
    assert (world.hosts, fsdpc.local_rank()) == (world.size // LOCAL, RANK % LOCAL)
    assert fsdpc._core.device_ordinal() == fsdpc.local_rank() % fsdpc.cuda.device_count()
    return ranks.strategies(name)


def crossed(_: str) -> dict[str, int]:
    """Bytes that steps of a larger model send to other hosts beside NCCL, and its parameters'."""
    model = ranks.Deep()
    for module in (*model.layers, model):
        fsdpc.fully_shard(module)
    optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)
    sent = []
    for _ in range(3):
        before = links[0].sent_bytes
        model(fsdpc.tensor(np.ones((2, 256), np.float32))).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(links[0].sent_bytes - before)
    return {"sent": sent[-1], "weights": 4 * sum(p.numel() for p in ranks.Deep().parameters())}


def disagree(_: str) -> str:
    """Ranks of the second host sum what the first host's gather."""
    world, t = fsdpc.distributed.world(), fsdpc.tensor(np.ones(8, np.float32))
    try:
        for _ in range(3):
            world.all_reduce(t)
        if RANK >= LOCAL:
            world.all_reduce(t)
        else:
            world.all_gather(t)
        fsdpc.barrier()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def aborted(_: str) -> list[Any]:
    """The last rank, whose GPU stands still, gives up; what the others learn, whose GPUs wait.

    All have posted the same by then, so that ranks wait for nothing else of each other.
    """
    plugin, world = ctypes.CDLL(os.environ["FSDPC_CUDA_PLUGIN"]), fsdpc.distributed.world()
    model = build("perceptron")
    ranks.train(model, "perceptron")
    rng, last = np.random.default_rng(RANK), RANK == world.size - 1
    batch = [fsdpc.tensor(array) for array in MODELS["perceptron"][1](rng)]
    plugin.emu_stall(int(last))
    model(*batch).backward()
    norm = fsdpc.clip_grad_norm_(model, 1.0)
    began = time.monotonic()
    try:
        fsdpc.barrier()
        if last:
            world.abort("out of disk")
            plugin.emu_stall(0)
            return ["it was I", 0.0]
        return [f"nothing was noticed: {float(norm)}", 0.0]
    except fsdpc.PeerError as error:
        return [str(error), time.monotonic() - began]


def told(names: str) -> list[Any]:
    """Values of variables, as C has them, once NCCL was used."""
    if "DESCRIBED" in os.environ:
        assert "NCCL 2." in fsdpc.cuda.describe_nccl()
    join()
    fsdpc.all_reduce(fsdpc.tensor([1.0]))
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_char_p
    return [value and value.decode() for value in map(get, map(str.encode, names.split(",")))]


def main() -> None:
    """Be one rank."""
    what, argument = sys.argv[1], "".join(sys.argv[2:])
    fn = next(getattr(place, what) for place in (sys.modules[__name__], ranks, graph_ranks)
              if hasattr(place, what))
    fsdpc.set_default_device("cuda")
    if fn is not told:
        join()
    result = json.dumps(fn(argument))
    if folder := os.environ.get("RESULTS"):  # launchers mix what ranks print
        Path(folder, f"rank{fsdpc.rank():03}").write_text(result)
    else:
        print(result, flush=True)
    fsdpc.shutdown()


if __name__ == "__main__":
    main()
