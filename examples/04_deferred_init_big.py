"""A model that no rank holds in full: built without memory, initialised slice by slice.

    fsdpc run --ranks 2 examples/04_deferred_init_big.py [PRESET]

PRESET is 10M by default; `1B` and larger work in the same way if the machine has enough memory. For
each parameter, all ranks together need 4 bytes for masters and 2 for the shared bfloat16 copy.
Training adds 4 for gradients and 8 for AdamW's states.
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import numpy as np

import fsdpc
from fsdpc.models import Llama, preset

config = preset(sys.argv[1] if sys.argv[1:] else "10M")
fsdpc.init()


def mebibytes(kind: str) -> float:
    """Return this rank's memory of a category."""
    return fsdpc.memory_stats()[f"{kind}_bytes"] / 2**20


fsdpc.manual_seed(0)
with fsdpc.deferred_init():
    huge = Llama(preset("70B"))
    model = Llama(config)
if fsdpc.rank() == 0:
    print(f"a model of {huge.num_parameters():,} parameters in {mebibytes('total'):.1f} MiB")
del huge

# Sharding gives each rank memory for its own rows and fills them. The values depend only on the
# seed and the element, so any number of ranks creates the same model.
policy = fsdpc.MixedPrecisionPolicy(param_dtype=fsdpc.bfloat16, reduce_dtype=fsdpc.float32)
for block in model.blocks():
    fsdpc.fully_shard(block, mp_policy=policy)
fsdpc.fully_shard(model, mp_policy=policy)
whole = 4 * model.num_parameters() / 2**20
print(f"this rank's masters: {mebibytes('master'):.1f} of {whole:.1f} MiB")

# The parameter buffer, shared by all ranks of the host, is created at the first forward; rank 0
# counts it.
with fsdpc.no_grad():
    logits = model(np.zeros((1, 16), np.int64))
print(f"the bfloat16 copy all ranks read: {mebibytes('unsharded'):.1f} MiB, logits {logits.shape}")

p = model.lm_head.weight
print(f"{p.shape} parameter, of which this rank owns {p.local.shape}")
norm = float(np.linalg.norm(fsdpc.full_tensor(p).numpy()))  # collective: gathers the full tensor
if fsdpc.rank() == 0:
    print(f"norm of the whole: {norm:.6f}, whatever the number of ranks")
fsdpc.shutdown()
