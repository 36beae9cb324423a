"""An MLP that classifies points, with accuracy over all ranks.

    fsdpc run --ranks 2 examples/07_classify.py [STEPS]

The points of three classes are on arms of a spiral. Each rank draws its own batches. The model
has batch normalisation over the batches of all ranks. At the end every rank classifies its part of
the held-out points, and the ranks sum their numbers of correct answers.
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import numpy as np

import fsdpc
from fsdpc import functional as F
from fsdpc import nn, optim

STEPS = int(sys.argv[1]) if sys.argv[1:] else 200
CLASSES, BATCH, HELD_BACK = 3, 64, 600


def spiral(count: int, seed: int) -> tuple[fsdpc.Tensor, fsdpc.Tensor]:
    """Return points (count, 2) on three arms, with noise, and the arm of each (count)."""
    rng = np.random.default_rng(seed)
    arm, radius = rng.integers(0, CLASSES, count), rng.uniform(0.1, 1, count)
    angle = 4 * radius + arm * 2 * np.pi / CLASSES + rng.normal(0, 0.1, count)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    return fsdpc.tensor(points.astype(np.float32)), fsdpc.tensor(arm)


class Classifier(nn.Module):
    """Two hidden layers."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, hidden),
            nn.SyncBatchNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return self.layers(x)


fsdpc.init()
fsdpc.manual_seed(0)
model = Classifier()
for layer in model.layers:
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
fsdpc.fully_shard(model)
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
optimizer = optim.AdamW(model.parameters(), lr=1e-2)

for step in range(STEPS):
    points, arms = spiral(BATCH, seed=step * fsdpc.world_size() + fsdpc.rank())
    loss = criterion(model(points), arms)
    loss.backward()
    fsdpc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 and fsdpc.rank() == 0:
        print(f"step {step}: loss {float(loss):.3f}")

model.eval()
points, arms = spiral(HELD_BACK, seed=10**6)
own = slice(fsdpc.rank(), None, fsdpc.world_size())
with fsdpc.no_grad():
    guesses = F.argmax(model(points[own]), -1)
right = fsdpc.all_reduce(int((guesses == arms[own]).sum()))
confused = F.one_hot(guesses, CLASSES).T.float() @ F.one_hot(arms[own], CLASSES).float()
confused = fsdpc.all_reduce(confused)
if fsdpc.rank() == 0:
    print(f"accuracy {right / HELD_BACK:.3f} of {HELD_BACK} points; chance is {1 / CLASSES:.3f}")
    print("guessed x true:", confused.to("int64").tolist())
fsdpc.shutdown()
