"""Train a 2 M LLaMA on Python's own library: fsdpc run --ranks 2 examples/01_train.py"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import fsdpc
from fsdpc import checkpoint, data, lr_scheduler, optim
from fsdpc.models import Llama, preset

steps = int(sys.argv[1]) if sys.argv[1:] else 400
folder = sys.argv[2] if sys.argv[2:] else None  # checkpoint folder: load from it, and save to it
fsdpc.init()  # the ranks of `fsdpc run`, torchrun or srun, or a world of one
fsdpc.manual_seed(0)

with fsdpc.deferred_init():  # no memory yet: each rank will initialise only its own slices
    model = Llama(preset("2M"))
policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
for block in model.blocks():
    fsdpc.fully_shard(block, mp_policy=policy)
fsdpc.fully_shard(model, mp_policy=policy)

text = data.ByteDataset(data.default_corpus(), seq_len=256)
sampler = data.DistributedSampler(len(text), fsdpc.rank(), fsdpc.world_size())
optimizer = optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = lr_scheduler.WarmupCosine(optimizer, steps // 20, steps, min_ratio=0.1)

with data.Loader(text, 16, sampler) as batches:
    state = {"model": model, "optimizer": optimizer, "scheduler": schedule, "data": batches}
    manager, begin = None, 0
    if folder:
        manager = checkpoint.CheckpointManager(folder, max_to_keep=2, every_steps=20)
        begin = manager.restore(state) or 0
    for step in range(begin, steps):
        loss = model(*next(batches))
        loss.backward()
        norm = fsdpc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if manager:
            manager.step(step + 1, state)
        if step % 20 == 0 and fsdpc.rank() == 0:
            print(f"step {step}: loss {float(loss):.3f}, gradient norm {float(norm):.2f}")
fsdpc.shutdown()
