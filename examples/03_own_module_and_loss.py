"""A custom model and loss, composed of operations from fsdpc.functional.

    fsdpc run --ranks 2 examples/03_own_module_and_loss.py [STEPS]

The model predicts the next byte from the last eight. Its loss is cross entropy with label
smoothing, written out, so that only the layers are ready-made.
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import numpy as np

import fsdpc
from fsdpc import data, nn
from fsdpc import functional as F

STEPS = int(sys.argv[1]) if sys.argv[1:] else 60
CONTEXT, DIM, BYTES = 8, 96, 256


class GatedBlock(nn.Module):
    """x + down(tanh(a(x)) * sigmoid(b(x))), after a norm."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.a = nn.Linear(dim, inner)
        self.b = nn.Linear(dim, inner)
        self.down = nn.Linear(inner, dim, bias=False)
        self.gain = nn.Parameter(np.ones(dim, np.float32))  # any leaf tensor to train

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        h = self.norm(x)
        return x + self.down(F.tanh(self.a(h)) * F.sigmoid(self.b(h))) * self.gain


class NextByte(nn.Module):
    """The embeddings of the last bytes, concatenated, two blocks, and a score for each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, DIM // CONTEXT)
        self.blocks = nn.Sequential(GatedBlock(DIM, 2 * DIM), GatedBlock(DIM, 2 * DIM))
        self.head = nn.Linear(DIM, BYTES)

    def forward(self, ids: fsdpc.Tensor) -> fsdpc.Tensor:
        x = self.embed(ids).reshape(ids.shape[0], DIM)
        return self.head(self.blocks(x))


def smoothed_loss(logits: fsdpc.Tensor, targets: fsdpc.Tensor, smooth: float = 0.1) -> fsdpc.Tensor:
    """Give the target a weight of 1 - smooth, and spread the rest over all bytes."""
    log_p = F.log_softmax(logits)
    chosen = F.embedding(targets, fsdpc.tensor(np.eye(BYTES, dtype=np.float32)))  # one-hot rows
    of_target = (log_p * chosen).sum(-1)
    return -((1 - smooth) * of_target.mean() + smooth * log_p.mean())


fsdpc.init()
fsdpc.manual_seed(0)
model = NextByte()
fsdpc.fully_shard(model.blocks)  # one unit each: gathered, freed and reduced together
fsdpc.fully_shard(model)
optimizer = fsdpc.optim.AdamW(model.parameters(), lr=3e-3)

text = data.ByteDataset(data.default_corpus(), seq_len=CONTEXT)
sampler = data.DistributedSampler(len(text), fsdpc.rank(), fsdpc.world_size())
with data.Loader(text, 256, sampler) as batches:
    for step in range(STEPS):
        x, y = next(batches)
        targets = fsdpc.tensor(np.ascontiguousarray(y[:, -1]))  # the byte after the last one
        loss = smoothed_loss(model(fsdpc.tensor(x)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fsdpc.rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {float(loss):.3f}")
fsdpc.shutdown()
