"""What a rank of test_two_hosts.py does: times a value that goes one way, and two that pass."""

import time
from collections.abc import Callable

import numpy as np
import torch.distributed as dist

import fsdpc
from fsdpc.torch import _mesh

dist.init_process_group("gloo")
world = _mesh.join()
value = fsdpc.tensor(np.zeros(250_000, np.float32))


def seconds(exchange: Callable[[], object]) -> float:
    """The least of three."""
    times = []
    for _ in range(3):
        world.barrier()
        began = time.monotonic()
        exchange()
        world.barrier()
        times.append(time.monotonic() - began)
    return min(times)


one = seconds(lambda: world.broadcast(value, 0))
both = seconds(lambda: world.all_gather(value))
print(f"one way {one} s, both ways {both} s", flush=True)
