"""Validation over ranks, text from the model, and its weights in a file.

    fsdpc run --ranks 2 examples/05_evaluate_and_generate.py [STEPS]

Forwards of a sharded model are collective: every rank must run the same number of them, even if
only rank 0 uses the result.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import numpy as np

import fsdpc
from fsdpc import data
from fsdpc.models import Llama, preset

STEPS = int(sys.argv[1]) if sys.argv[1:] else 60
BATCH = 8

fsdpc.init()
rank, world = fsdpc.rank(), fsdpc.world_size()
fsdpc.manual_seed(0)
with fsdpc.deferred_init():
    model = Llama(preset("2M"))
for block in model.blocks():
    fsdpc.fully_shard(block)
fsdpc.fully_shard(model)
optimizer = fsdpc.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))

whole = data.ByteDataset(data.default_corpus(), seq_len=128)
training, held_out = whole.split(64_000)


def evaluate() -> float:
    """Return the mean loss, in nats per byte, over the held-out data.

    Each rank takes every world-th batch. A rank that runs out of batches repeats the first one and
    does not count it, so that all ranks run the same number of forwards.
    """
    batches = [range(i, min(i + BATCH, len(held_out))) for i in range(0, len(held_out), BATCH)]
    total, count = 0.0, 0
    model.eval()
    with fsdpc.no_grad():
        for first in range(0, len(batches), world):
            mine = first + rank
            x, y = held_out.batch(batches[mine if mine < len(batches) else 0])
            loss = float(model(x, y))
            if mine < len(batches):
                total, count = total + loss * y.size, count + y.size
    model.train()
    return fsdpc.all_reduce(total) / fsdpc.all_reduce(count)


sampler = data.DistributedSampler(len(training), rank, world)
before = evaluate()
with data.Loader(training, BATCH, sampler) as batches:
    for _ in range(STEPS):
        model(*next(batches)).backward()
        fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
after = evaluate()
if rank == 0:
    print(f"validation loss {before:.3f} before, {after:.3f} after {STEPS} steps")

# Every rank draws the same bytes, since the seed is the same.
prompt = np.frombuffer(b"def ", np.uint8)
ids = model.generate(prompt, 60, temperature=0.8)
if rank == 0:
    print(bytes(ids.astype(np.uint8)).decode("utf-8", "replace"))

# state_dict() gathers full values, on every rank; only one rank writes them.
state: dict[str, Any] = {name: value.numpy() for name, value in model.state_dict().items()}
if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.npz"
        np.savez(path, **state)
        alone = Llama(preset("2M"))  # not sharded
        alone.load_state_dict(np.load(path))
    x, y = held_out.batch(range(BATCH))
    with fsdpc.no_grad():
        print(f"the file's model, on rank 0 alone: loss {float(alone(x, y)):.3f}")
fsdpc.barrier()
fsdpc.shutdown()
