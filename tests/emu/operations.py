"""Composed operations on a device (argument), as JSON: results, gradients, captured steps."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import fsdpc
from fsdpc import functional as F
from fsdpc import nn


def squared_relu(x: fsdpc.Tensor) -> fsdpc.Tensor:
    """With a backward of its own, as docs/custom.md has it."""
    with fsdpc.no_grad():
        positive = F.relu(x)
        y = positive * positive
    return F.custom([x], [y], lambda dy: 2 * dy * positive)[0]


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
    "logsumexp": lambda x: F.logsumexp(x, 1) + F.logsumexp(x.transpose(0, 1) * 100, 0),
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
    "conv groups": lambda x: F.conv2d(x.reshape(1, 2, 2, 3), x.reshape(2, 1, 2, 3), x[0, :2],
                                      (1, 2), (1, 2), groups=2),
    "pool": lambda x: F.max_pool2d(x.reshape(1, 1, 3, 4), 2, 1),
    "pool mean": lambda x: F.avg_pool2d(x.reshape(1, 1, 3, 4), 3, 2, 1),
    "batch norm": lambda x: nn.BatchNorm1d(4)(x),
    "batch norm rows": lambda x: nn.BatchNorm1d(2)(x.reshape(2, 2, 3)),
    "group norm": lambda x: F.group_norm(x.reshape(1, 4, 3), 2, x[0]),
    "custom": squared_relu,
    "encoder": lambda x: layer(x.reshape(1, 3, 4)),
}


def written() -> list[float]:
    """What assignment by masks leaves, and rows of bool."""
    x = fsdpc.tensor(np.arange(20.0).reshape(4, 5))
    x[MASK] = -1
    x[[0, 0], 1] = fsdpc.tensor([5.0, 6.0])
    picked = F.gather(x > 0, 1, fsdpc.tensor([[4], [0], [0], [0]]))
    return [*x.reshape(-1).tolist(), *picked.to("int64").reshape(-1).tolist()]


class Scored(nn.Module):
    """A linear layer, and a number that a function makes of its output (3, 4)."""

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.layer, self.score = nn.Linear(4, 4), score

    def forward(self, x: fsdpc.Tensor) -> fsdpc.Tensor:
        return self.score(self.layer(x))


def captured(ids: fsdpc.Tensor) -> dict[str, list[list[float]]]:
    """Weights after five steps, and after three steps and two replays of the last; or why not."""
    row, seen = ids[0, :3], ids[:, :1] >= 0
    scores = {
        "where": lambda y: F.where(y > 0, y.clamp(-1, 1), 0.0).sum(),
        "gather": lambda y: F.gather(y, 0, ids).norm(),
        "smooth": lambda y: F.cross_entropy(y, row, label_smoothing=0.1),
        "triangle": lambda y: F.pad(y.tril().cumsum(1).flip(0), (1, 1)).var(),
        "batch norm": lambda y: (F.batch_norm(y) * y).sum(),
        "attention": lambda y: F.scaled_dot_product_attention(
            *[y.reshape(1, 1, 3, 4)] * 3, causal=True, mask=seen).sum(),
        "custom": lambda y: squared_relu(y).sum(),
        "max": lambda y: y.max(1).values.sum(),
    }  # fmt: skip
    found = {}
    for name, score in scores.items():
        found[name] = [trained(score, replays) for replays in (0, 2)]
    return found


def trained(score: Any, replays: int) -> Any:
    fsdpc.manual_seed(6)
    model, x = Scored(score), fsdpc.ones(3, 4) * fsdpc.tensor([1.0, 0.5, -1.0, 2.0])
    fsdpc.fully_shard(model)
    optimizer = fsdpc.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2 if replays else 5):
        step()
    if replays:
        graph = fsdpc.graph_step(model, optimizer)
        try:
            with graph:
                step()
        except RuntimeError as error:
            return str(error)
        for _ in range(replays):
            graph.replay()
    return fsdpc.full_tensor(model.layer.weight).reshape(-1).tolist()


fsdpc.set_default_device(sys.argv[1])
fsdpc.manual_seed(4)
layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
if sys.argv[2:] == ["captured"]:
    print(json.dumps(captured(fsdpc.tensor(IDS))))
    sys.exit()
found = {"written": written()}
for name, op in CASES.items():
    x = fsdpc.tensor(np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32))
    y = op(x.requires_grad_())
    (y * y).sum().backward()
    found[name] = [*y.detach().reshape(-1).tolist(), *x.grad.reshape(-1).tolist()]
print(json.dumps(found))
