"""Random programs of writes in place, beside torch's: values, gradients and names of memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tests.ops.test_in_place import Make, fsdpc_tensor, torch_tensor, zeros


class Machine:
    """Tensors of one library, changed by drawn instructions; None for one that was refused."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.w = make(np.float32([1.5, -2.0, 0.5]), True)
        self.v = make(np.float32([[1.0, 2.0, -1.0], [0.5, 1.5, 2.5]]), True)
        self.live = [zeros(make, 2, 3), self.v * self.w, self.v * 1, zeros(make, 2, 3) + 1]

    def value(self, kind: int, i: int) -> Any:
        x = self.live[i]
        return [self.w, self.w * 2, 2.0, x[0], x[1] * 1, self.v[1], x[0].detach() * 1][kind]

    def run(self, what: str, i: int, j: int, kind: int) -> None:
        x = self.live[i]
        value = self.value(kind, j)
        if what == "flat":
            x.reshape(-1)[:3] = value
        elif what == "set":
            x[kind % 2] = value
        elif what == "part":
            x[:, 1:] = value if kind == 2 else value[1:]
        elif what == "add":
            x += value
        elif what == "mul":
            x *= value
        elif what == "row add":
            x[0] += value
        elif what == "view":
            row = x[1]
            row *= value
        elif what == "row of a row":
            x.reshape(3, 2)[1:].reshape(-1)[1:4] += value
        elif what == "own operand":
            x[1] += self.live[j][0]
        elif what == "constant operand":
            x[1] += self.live[j][0].detach()
        elif what == "named operand":
            row = self.live[j][0]
            x[1] += row
            self.live[i] = self.live[i] + row
        elif what == "named views":
            row = x[0]
            part = row[:]
            part += value
            self.live[j] = self.live[j] * 0.5 + row + part
        elif what == "rows":
            self.live[i] = self.live[j][0:2]
        elif what == "unnamed base":
            self.live[i] = (self.live[j] * 2).reshape(3, 2).reshape(2, 3)
        elif what == "mask":
            x[self.make([True, False])] = value
        elif what == "copy":
            x.copy_(value) if kind != 2 else x.fill_(value)
        else:
            self.live[i] = self.live[j] if what == "name" else self.live[j] * self.live[i]


WHAT = ["flat", "set", "part", "add", "mul", "row add", "view", "mask", "copy", "name", "product",
        "row of a row", "own operand", "constant operand", "named operand", "named views", "rows",
        "unnamed base"]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """What ours does not refuse has torch's values, and torch's gradients unless torch refuses."""
    rng, compared = random.Random(seed), 0
    for _ in range(60):
        ours, theirs = Machine(fsdpc_tensor), Machine(torch_tensor)
        script = [(rng.choice(WHAT), rng.randrange(4), rng.randrange(4), rng.randrange(7))
                  for _ in range(rng.randrange(1, 8))]  # fmt: skip
        try:
            for line in script:
                ours.run(*line)
            sum((x * (n + 1)).sum() for n, x in enumerate(ours.live)).backward()
            mine = [p.grad for p in (ours.w, ours.v)]
        except RuntimeError:
            mine = None
        try:
            for line in script:
                theirs.run(*line)
        except RuntimeError:  # such as overlapping memory, which ours reads first
            continue
        if mine is None:
            continue
        for x, y in zip(ours.live, theirs.live, strict=True):
            np.testing.assert_allclose(
                x.detach().numpy(), y.detach().numpy(), rtol=1e-4, atol=1e-4, err_msg=str(script)
            )
        try:
            sum((x * (n + 1)).sum() for n, x in enumerate(theirs.live)).backward()
        except RuntimeError:
            continue
        compared += 1
        for x, y in zip(mine, (theirs.w.grad, theirs.v.grad), strict=True):
            want = np.zeros(1) if y is None else y.numpy()
            got = np.zeros(1) if x is None else x.numpy()
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3, err_msg=str(script))
    assert compared > 40
