"""A vision transformer that distinguishes stripes by their direction.

    fsdpc run --ranks 2 examples/09_vit.py [STEPS] [STRATEGY]

Images (1, 16, 16) show stripes in one of four directions, of any width and position, with noise. A
convolution turns each patch of 4 x 4 into a token. STRATEGY is FULL_SHARD by default; NO_SHARD is
plain data parallelism and prints the same losses.
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import numpy as np

import fsdpc
from fsdpc import functional as F
from fsdpc import lr_scheduler, nn, optim

STEPS = int(sys.argv[1]) if sys.argv[1:] else 150
STRATEGY = sys.argv[2] if sys.argv[2:] else "FULL_SHARD"
SIDE, PATCH, CLASSES, BATCH, HELD_BACK = 16, 4, 4, 32, 400


def stripes(count: int, seed: int) -> tuple[fsdpc.Tensor, fsdpc.Tensor]:
    """Return images (count, 1, SIDE, SIDE) and the direction of each (count)."""
    rng = np.random.default_rng(seed)
    direction = rng.integers(0, CLASSES, count)
    angle = np.pi / CLASSES * direction + rng.normal(0, 0.05, count)
    width, phase = rng.uniform(4, 8, count), rng.uniform(0, 2 * np.pi, count)
    row, column = np.mgrid[:SIDE, :SIDE]
    across = np.cos(angle)[:, None, None] * column + np.sin(angle)[:, None, None] * row
    images: np.ndarray = np.sin(2 * np.pi * across / width[:, None, None] + phase[:, None, None])
    images += rng.normal(0, 0.5, images.shape)
    return fsdpc.tensor(images[:, None].astype(np.float32)), fsdpc.tensor(direction)


class ViT(nn.Module):
    """Patches, positions, encoder layers; the first token is not a patch and predicts the class."""

    def __init__(self, dim: int = 48, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        tokens = (SIDE // PATCH) ** 2
        self.patches = nn.Conv2d(1, dim, PATCH, stride=PATCH)
        self.first = nn.Parameter(np.zeros((1, 1, dim), np.float32))
        self.positions = nn.init.normal_(nn.Parameter.empty((1, tokens + 1, dim)), 0.0, 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, heads, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, images: fsdpc.Tensor) -> fsdpc.Tensor:
        x = self.patches(images)  # (batch, dim, SIDE / PATCH, SIDE / PATCH)
        batch, dim = x.shape[:2]
        x = x.reshape(batch, dim, -1).transpose(1, 2)
        x = F.cat([self.first.expand(batch, 1, dim), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


fsdpc.init()
fsdpc.manual_seed(0)
model = ViT()
for layer in model.layers:
    fsdpc.fully_shard(layer, strategy=STRATEGY)
fsdpc.fully_shard(model, strategy=STRATEGY)
optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
schedule = lr_scheduler.WarmupCosine(optimizer, STEPS // 10, STEPS, min_ratio=0.1)

for step in range(STEPS):
    images, directions = stripes(BATCH, seed=step * fsdpc.world_size() + fsdpc.rank())
    loss = F.cross_entropy(model(images), directions)
    loss.backward()
    fsdpc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 25 == 0 and fsdpc.rank() == 0:
        print(f"step {step}: loss {float(loss):.4f}")

# Each rank evaluates its part of the held-out images; the counts are summed.
model.eval()
images, directions = stripes(HELD_BACK, seed=10**6)
own = slice(fsdpc.rank(), None, fsdpc.world_size())
with fsdpc.no_grad():
    guesses = F.argmax(model(images[own]), -1)
right = fsdpc.all_reduce(int((guesses == directions[own]).sum()))
if fsdpc.rank() == 0:
    print(f"accuracy {right / HELD_BACK:.3f} of {HELD_BACK} images; chance is {1 / CLASSES:.3f}")
fsdpc.shutdown()
