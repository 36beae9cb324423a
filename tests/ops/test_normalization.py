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
@pytest.mark.parametrize(
    "shape", [(3, 6), (3, 6, 1), (2, 6, 4), (2, 6, 3, 2), (0, 6, 4), (2, 6, 97)]
)
def test_group_norm(shape, dtype):
    inputs = [noise(*shape), noise(6, seed=1), noise(6, seed=2)]
    same_as_torch(lambda x, w, b: F.group_norm(x, 3, w, b),
                  lambda x, w, b: TF.group_norm(x, 3, w, b), inputs, dtype, 8)  # fmt: skip
    with pytest.raises(ValueError, match="4 groups of x"):
        F.group_norm(fsdpc.zeros(*shape), 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 1), (4, 3, 5), (2, 3, 4, 3), (1, 3, 97)])
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


@pytest.mark.parametrize("shape", [(2, 6, 4, 40), (40, 6)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mean_far_from_zero(shape, dtype):
    """Costs the digits that the mean has before the point, no more."""
    inputs = [noise(*shape) + 1000, noise(6, seed=1), noise(6, seed=2)]
    bound = 60 if dtype == "float32" else 8
    groups = 3 if len(shape) > 2 else 1  # of two elements, close neighbours would lose more
    same_as_torch(lambda x, w, b: F.group_norm(x, groups, w, b),
                  lambda x, w, b: TF.group_norm(x, groups, w, b), inputs, dtype, bound)  # fmt: skip
    same_as_torch(
        lambda x, w, b: F.batch_norm(x, None, w, b),
        lambda x, w, b: TF.batch_norm(x, None, None, w, b, True), inputs, dtype, bound,
    )  # fmt: skip
    mean, var = F.batch_statistics(fsdpc.tensor(inputs[0]).to(dtype))
    dims = tuple(d for d in range(len(shape)) if d != 1)
    seen = values(fsdpc.tensor(inputs[0]).to(dtype))
    np.testing.assert_allclose(mean.numpy(), seen.mean(dims), rtol=1.2e-7)
    np.testing.assert_allclose(var.numpy(), seen.var(dims), rtol=1e-5)  # of float32 means


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_alone_have_gradients(dtype):
    for shape in ((5, 3), (4, 3, 5)):
        dims = [d for d in range(len(shape)) if d != 1]
        for keep in ((0, 1), (0,), (1,)):
            same_as_torch(
                lambda x, keep=keep: sum(F.batch_statistics(x)[i] * (i + 2) for i in keep),
                lambda x, keep=keep, dims=dims: sum(
                    (x.mean(dims), x.var(dims, correction=0))[i] * (i + 2) for i in keep
                ), [noise(*shape)], dtype, 8,
            )  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
def test_gradients_of_statistics_that_are_given(given):
    """All inputs of batch_norm have gradients, each where it alone is wanted too."""
    inputs = [noise(4, 3, 5), noise(3, seed=1), noise(3, seed=2) ** 2 + 1, noise(3, seed=3)]
    inputs += [noise(3, seed=4)] * given

    def theirs(x, mean, var, weight, bias=None):
        along = (3, 1)
        y = (x - mean.reshape(along)) / (var.reshape(along) + 1e-5).sqrt() * weight.reshape(along)
        return y if bias is None else y + bias.reshape(along)

    same_as_torch(lambda x, mean, var, *affine: F.batch_norm(x, (mean, var), *affine), theirs,
                  inputs, "float32", 4)  # fmt: skip
    x, weight = fsdpc.tensor(inputs[0]), fsdpc.tensor(inputs[1], requires_grad=True)
    F.batch_norm(x, None, weight).sum().backward()
    F.group_norm(x, 3, None, weight).sum().backward()
    assert x.grad is None and abs(weight.grad.numpy() - 20).max() < 1e-5


def test_what_backward_needs_may_not_change():
    for norm in (lambda x: F.group_norm(x, 3), F.batch_norm, lambda x: F.batch_statistics(x)[1],
                 lambda x: F.batch_norm(x, (x[0, :, 0], x[0, :, 1] ** 2))):  # fmt: skip
        x = fsdpc.tensor(noise(2, 3, 4), requires_grad=True)
        mid = x * 2
        y = norm(mid)
        with fsdpc.no_grad():
            mid.zero_()
        with pytest.raises(RuntimeError, match="changed in place since"):
            y.sum().backward()


def test_rows_are_checked():
    x, one = fsdpc.zeros(2, 3), fsdpc.ones(1)
    core = fsdpc._core
    with pytest.raises(ValueError, match="row_moments: 4 rows of 6 elements"):
        core.row_moments(x, 4)
    with pytest.raises(ValueError, match="row_moments: rows is -1 and cannot be negative"):
        core.row_moments(x, -1)
    with pytest.raises(ValueError, match=r"row_moments: x has shape \(2, 3\) and the other"):
        core.row_moments(x, 2, fsdpc.zeros(2))
    with pytest.raises(ValueError, match="row_affine: 4 values for 6 rows"):
        core.row_affine(x, 6, fsdpc.ones(4))
    with pytest.raises(ValueError, match="row_affine: 2 values for 6 rows"):
        core.row_affine(x, 6, one, fsdpc.ones(2))
    with pytest.raises((TypeError, ValueError), match="values of rows must be float32"):
        core.row_affine(x, 6, one.double())
    with pytest.raises((TypeError, ValueError), match="must have a float dtype"):
        core.row_moments(x.to("int64"), 6)
    assert core.row_moments(fsdpc.zeros(0, 3), 0).shape == (2, 0)


def test_statistics_of_nothing():
    with pytest.raises(ValueError, match=r"shape \(0, 3\)"):
        F.batch_statistics(fsdpc.zeros(0, 3))
    with pytest.raises(ValueError, match="channels, ..."):
        F.batch_statistics(fsdpc.zeros(3))


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("least", [1, 0])
def test_statistics_over_ranks_are_those_of_one_batch(least):
    """Of batches of unequal size, and their gradients, summed over ranks."""
    rank, world = fsdpc.rank(), fsdpc.world_size()
    sizes = np.cumsum([0, *range(least, world + least)]) * 2
    if sizes[-1] == 0:
        return
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


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("least", [1, 0])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_sync_batch_norm_is_batch_norm_of_one_batch(least, shape):
    """Of batches of unequal size, one of them empty: results, gradients, running statistics."""
    rank, world = fsdpc.rank(), fsdpc.world_size()
    sizes = np.cumsum([0, *range(least, world + least)]) * 2
    if sizes[-1] == 0:
        return
    whole, weights = noise(sizes[-1], 3, *shape), noise(sizes[-1], 3, *shape, seed=1)
    own = slice(sizes[rank], sizes[rank + 1])
    ours, one = fsdpc.nn.SyncBatchNorm(3), fsdpc.nn.SyncBatchNorm(3)
    one._over_ranks = False
    x, z = (fsdpc.tensor(v, requires_grad=True) for v in (whole[own], whole))
    y, want = ours(x), one(z)
    (y * weights[own]).sum().backward()
    (want * weights).sum().backward()
    np.testing.assert_allclose(y.numpy(), want.numpy()[own], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(x.grad.numpy(), z.grad.numpy()[own], rtol=1e-9, atol=1e-12)
    for a, b in zip(ours.parameters(), one.parameters(), strict=True):
        total = fsdpc.all_reduce(a.grad)  # of a rank's own batch
        np.testing.assert_allclose(total.numpy(), b.grad.numpy(), rtol=1e-5, atol=1e-5)
    for a, b in zip(ours.state_dict().values(), one.state_dict().values(), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)


def test_one_value_a_channel_has_no_variance():
    for shape in ((1, 3), (1, 3, 1)):
        with pytest.raises(ValueError, match=r"batch_norm: shape .* one value for each channel"):
            F.batch_norm(fsdpc.ones(shape))
    with pytest.raises(ValueError, match="one value for each channel"):
        fsdpc.nn.BatchNorm1d(3)(fsdpc.ones(1, 3))
    assert fsdpc.nn.BatchNorm1d(3).eval()(fsdpc.ones(1, 3)).shape == (1, 3)


def test_states_without_a_count_of_batches_load_as_in_torch() -> None:
    norm = fsdpc.nn.Sequential(fsdpc.nn.BatchNorm1d(3), fsdpc.nn.Linear(3, 3))
    state = {name: value + 1 for name, value in norm.state_dict().items()}
    del state["0.num_batches_tracked"]
    assert norm.load_state_dict(state) == ([], [])
    assert norm[0].num_batches_tracked.item() == 0 and norm[0].running_var.numpy()[0] == 2
    del state["0.running_var"]
    with pytest.raises(KeyError, match=r"missing \['0.running_var'\]"):
        norm.load_state_dict(state)
