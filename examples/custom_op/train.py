"""Train sharded layers that use the operation of bias_gelu.py.

    fsdpc run --ranks 2 examples/custom_op/train.py [STEPS]

The layers learn y = sin(3 x) from random points.
"""

import sys

if "--help" in sys.argv[1:]:  # without ranks or slow imports
    print(__doc__)
    sys.exit()

import numpy as np
from bias_gelu import bias_gelu

import fsdpc
from fsdpc import functional as F
from fsdpc import nn, optim

STEPS = int(sys.argv[1]) if sys.argv[1:] else 200


class Layer(nn.Module):
    """gelu(x @ weight.T + bias), the bias and the gelu in one pass."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.product = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(np.zeros(outputs, np.float32))

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return bias_gelu(self.product(x), self.bias)


fsdpc.init()
fsdpc.manual_seed(0)
model = nn.Sequential(Layer(1, 64), Layer(64, 64), nn.Linear(64, 1))
for layer in model:
    fsdpc.fully_shard(layer)
fsdpc.fully_shard(model)
optimizer = optim.AdamW(model.parameters(), lr=1e-2)

rng = np.random.default_rng(fsdpc.rank())  # each rank draws its own points
for step in range(STEPS):
    x = rng.uniform(-1, 1, (64, 1)).astype(np.float32)
    loss = F.mse_loss(model(fsdpc.tensor(x)), fsdpc.tensor(np.sin(3 * x)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if fsdpc.rank() == 0 and step % 20 == 0:
        print(f"step {step}: loss {float(loss):.4f}")
fsdpc.shutdown()
