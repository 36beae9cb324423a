"""Large batches with little memory: micro-steps, recomputed activations, weight decay by group.

    fsdpc run --ranks 2 examples/02_bf16_accumulate.py [STEPS]

Every optimizer step sums the gradients of `ACCUMULATE` micro-steps. Compute and the gathered
parameters are bfloat16. The optimizer's masters and states, and the sums over ranks and
micro-steps, stay float32.
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import fsdpc
from fsdpc import data
from fsdpc.models import Llama, preset

STEPS = int(sys.argv[1]) if sys.argv[1:] else 30
ACCUMULATE = 4

fsdpc.init()
fsdpc.manual_seed(0)
with fsdpc.deferred_init():
    model = Llama(preset("2M"))

# Blocks keep only their inputs and run forward again in backward. The results do not change.
# 2 selects every second block, 0.5 half of them, a function those for which it returns True.
fsdpc.checkpoint_activations(model.blocks(), "all")

policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
for block in model.blocks():
    fsdpc.fully_shard(block, mp_policy=policy)
fsdpc.fully_shard(model, mp_policy=policy)

# Norm weights are vectors; weight decay towards 0 would harm them.
matrices = [p for p in model.parameters() if p.ndim >= 2]
vectors = [p for p in model.parameters() if p.ndim < 2]
optimizer = fsdpc.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
    lr=2e-3,
    betas=(0.9, 0.95),
)

text = data.ByteDataset(data.default_corpus(), seq_len=128)
sampler = data.DistributedSampler(len(text), fsdpc.rank(), fsdpc.world_size(), seed=1)
with data.Loader(text, 4, sampler) as batches:
    for step in range(STEPS):
        total = 0.0
        for _ in range(ACCUMULATE):
            loss = model(*next(batches)) / ACCUMULATE  # the mean over all micro-steps
            loss.backward()
            total += float(loss)
        norm = fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = fsdpc.all_reduce(total, "mean")  # collective: call it on every rank
        if fsdpc.rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {mean:.3f}, gradient norm {float(norm):.2f}")

held = fsdpc.memory_stats()
kinds = ("unsharded", "master", "grad", "state", "reduce", "activation")
print("peak MiB: " + ", ".join(f"{k} {held[f'{k}_peak_bytes'] / 2**20:.1f}" for k in kinds))
fsdpc.shutdown()
