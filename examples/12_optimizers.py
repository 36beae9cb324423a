"""AdamW, Muon and Adafactor on one LLaMA: a table of final losses, and a picture of the curves.

    fsdpc run --ranks 2 examples/12_optimizers.py [STEPS [PICTURE]]

Each optimizer trains a LLaMA of 2M parameters from the same start on the same batches of Python's
own library. PICTURE is optimizers.png by default, in the current folder; it needs matplotlib.
"""

import sys
from collections.abc import Callable

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import fsdpc
from fsdpc import data, lr_scheduler, optim, plots
from fsdpc.models import Llama, preset

STEPS = int(sys.argv[1]) if sys.argv[1:] else 100
PICTURE = sys.argv[2] if sys.argv[2:] else "optimizers.png"
BATCH, LAST = 4, 10  # sequences per rank; the final loss is the mean of the last steps

OPTIMIZERS: dict[str, Callable[[Llama], optim.Optimizer]] = {
    "AdamW": lambda model: optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
    # Matrices inside blocks take Muon; embeddings, the head and norms take AdamW.
    "Muon": lambda model: optim.Muon(optim.muon_groups(model, lr=2e-3), lr=0.02),
    # Its rate is relative to each parameter's root mean square.
    "Adafactor": lambda model: optim.Adafactor(model.parameters(), lr=0.05),
}


def train(make: Callable[[Llama], optim.Optimizer]) -> tuple[list[float], float]:
    """Return the loss of each step, as a mean over ranks, and this rank's MiB of states."""
    fsdpc.manual_seed(0)
    with fsdpc.deferred_init():
        model = Llama(preset("2M"))
    for block in model.blocks():
        fsdpc.fully_shard(block)
    fsdpc.fully_shard(model)
    optimizer = make(model)
    schedule = lr_scheduler.WarmupCosine(optimizer, STEPS // 10, STEPS, min_ratio=0.1)
    text = data.ByteDataset(data.default_corpus(), seq_len=64)
    sampler = data.DistributedSampler(len(text), fsdpc.rank(), fsdpc.world_size())
    losses: list[float] = []
    with data.Loader(text, BATCH, sampler) as batches:
        for _ in range(STEPS):
            loss = model(*next(batches))
            loss.backward()
            fsdpc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(fsdpc.all_reduce(float(loss)) / fsdpc.world_size())
    return losses, fsdpc.memory_stats()["state_bytes"] / 2**20


fsdpc.init()
runs: list[plots.Run] = []
rows: list[str] = []
for name, make in OPTIMIZERS.items():
    losses, states = train(make)
    runs.append(plots.Run(name, {"loss": dict(enumerate(losses, 1))}))
    final = sum(losses[-LAST:]) / len(losses[-LAST:])
    rows.append(f"{name:<10} {losses[0]:10.3f} {final:10.3f} {states:11.2f}")
if fsdpc.rank() == 0:
    print("optimizer  first loss final loss  states MiB", *rows, sep="\n")
    plots.plot_runs(runs, PICTURE)  # pyright: ignore[reportUnknownMemberType] of matplotlib
    print(f"wrote {PICTURE}")
fsdpc.shutdown()
