"""Group and batch normalisation beside torch's, and over ranks beside one batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from beside import noise, same_as_torch
from oracle import FLOATS, values

import fsdpc

F = fsdpc.functional


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 6), (2, 6, 4), (2, 6, 3, 2)])
def test_group_norm(shape, dtype):
    inputs = [noise(*shape), noise(6, seed=1), noise(6, seed=2)]
    same_as_torch(lambda x, w, b: F.group_norm(x, 3, w, b),
                  lambda x, w, b: TF.group_norm(x, 3, w, b), inputs, dtype, 8)  # fmt: skip
    with pytest.raises(ValueError, match="4 groups of x"):
        F.group_norm(fsdpc.zeros(*shape), 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5), (2, 3, 4, 3)])
def test_batch_norm(shape, dtype):
    inputs = [noise(*shape), noise(3, seed=1), noise(3, seed=2)]
    same_as_torch(
        lambda x, w, b: F.batch_norm(x, None, w, b),
        lambda x, w, b: TF.batch_norm(x, None, None, w, b, True), inputs, dtype, 8,
    )  # fmt: skip
    mean, var = noise(3, seed=3), noise(3, seed=4) ** 2
    given = (fsdpc.tensor(mean).float(), fsdpc.tensor(var).float())
    kept = [torch.tensor(values(t)) for t in given]
    same_as_torch(lambda x: F.batch_norm(x, given), lambda x: TF.batch_norm(x, *kept),
                  inputs[:1], dtype, 40 if dtype == "float64" else 8)  # fmt: skip


def test_statistics_of_nothing():
    with pytest.raises(ValueError, match=r"shape \(0, 3\)"):
        F.batch_statistics(fsdpc.zeros(0, 3))
    with pytest.raises(ValueError, match="channels, ..."):
        F.batch_statistics(fsdpc.zeros(3))


@pytest.mark.ranks([1, 2, 3])
def test_statistics_over_ranks_are_those_of_one_batch():
    """Of batches of unequal size, and their gradients, summed over ranks."""
    rank, world = fsdpc.rank(), fsdpc.world_size()
    sizes = np.cumsum([0, *range(1, world + 1)]) * 2
    whole, weights = noise(sizes[-1], 3, 2), noise(sizes[-1], 3, 2, seed=1)
    own = slice(sizes[rank], sizes[rank + 1])
    x = fsdpc.tensor(whole[own], requires_grad=True)
    y = F.batch_norm(x, F.batch_statistics(x, over_ranks=True))
    (y * weights[own]).sum().backward()
    one = fsdpc.tensor(whole, requires_grad=True)
    z = F.batch_norm(one)
    (z * weights).sum().backward()
    np.testing.assert_allclose(y.numpy(), z.numpy()[own], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(x.grad.numpy(), one.grad.numpy()[own], rtol=1e-9, atol=1e-12)
