"""Results and gradients of composed operations on a device (argument), as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np

import fsdpc
from fsdpc import functional as F
from fsdpc import nn

IDS = np.array([[2, 0, 1, 1], [0, 2, 2, 0], [1, 1, 0, 2]])
MASK = np.arange(20).reshape(4, 5) % 3 > 0

CASES = {
    "where": lambda x: F.where(MASK[:3, :4], x, -x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "maximum": lambda x: F.maximum(x, x.flip(0)),
    "pow": lambda x: F.pow(x.abs() + 1, x),
    "functions": lambda x: x.sin() + x.cos() * x.erf() + (x * x).log1p() + x.expm1(),
    "max": lambda x: x.max(1).values,
    "argmin": lambda x: x.argmin(0).float() + x.sum(),
    "var": lambda x: x.var(0),
    "norm": lambda x: x.norm(),
    "cumsum": lambda x: x.cumsum(1),
    "gather": lambda x: F.gather(x, 0, fsdpc.tensor(IDS)),
    "scatter": lambda x: F.scatter_add(x, 1, fsdpc.tensor(IDS), x),
    "index": lambda x: x[[2, 0]][:, np.array([True, False, True, True])],
    "sort": lambda x: x.sort(1, True)[0],
    "pad": lambda x: F.pad(x, (1, 2), "reflect"),
    "repeat": lambda x: x.repeat(2, 3),
    "tril": lambda x: x.tril(),
    "einsum": lambda x: F.einsum("ij,kj->ik", x, x),
    "nll": lambda x: F.nll_loss(x, fsdpc.tensor([0, -100, 3])),
    "smooth": lambda x: F.cross_entropy(x, fsdpc.tensor([0, -100, 3]), label_smoothing=0.1),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.sigmoid().detach()),
    "conv": lambda x: F.conv2d(x.reshape(1, 1, 3, 4), fsdpc.ones(2, 1, 2, 2), padding=1),
    "pool": lambda x: F.max_pool2d(x.reshape(1, 1, 3, 4), 2, 1),
    "batch norm": lambda x: nn.BatchNorm1d(4)(x),
    "encoder": lambda x: layer(x.reshape(1, 3, 4)),
}


def written() -> list[float]:
    """What assignment by masks leaves, and rows of bool."""
    x = fsdpc.tensor(np.arange(20.0).reshape(4, 5))
    x[MASK] = -1
    x[[0, 0], 1] = fsdpc.tensor([5.0, 6.0])
    picked = F.gather(x > 0, 1, fsdpc.tensor([[4], [0], [0], [0]]))
    return [*x.reshape(-1).tolist(), *picked.to("int64").reshape(-1).tolist()]


fsdpc.set_default_device(sys.argv[1])
fsdpc.manual_seed(4)
layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
found = {"written": written()}
for name, op in CASES.items():
    x = fsdpc.tensor(np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32))
    y = op(x.requires_grad_())
    (y * y).sum().backward()
    found[name] = [*y.detach().reshape(-1).tolist(), *x.grad.reshape(-1).tolist()]
print(json.dumps(found))
